"""The flash store: pages of NAND that are allocated, programmed, read and erased, and the modelled time of that.

What a page holds is not known here. Whoever refers to pages says so through `references.Referrer`.
"""
