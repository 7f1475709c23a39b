"""Flash store: allocates, programs, reads and erases NAND pages, with the simulated time of each operation.

It does not know what a page holds. Layers that keep pages in use register through `references.Referrer`.
"""
