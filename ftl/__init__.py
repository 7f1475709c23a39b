"""The flash translation layer: K and V groups in modelled NAND, and the modelled time of reaching them.

It maps (sequence, layer, head, group) straight to a physical page: no file system and no block layer on top.
What the groups are used for is not known here.
"""

from ftl.errors import FtlError, NandRuleError, OutOfSpace, ReadOnly, Uncorrectable, UnknownSequence
from ftl.faults import FaultPlan
from ftl.kv import Ftl
from ftl.nand import Nand
from ftl.pages import PagePlan

__all__ = [
    "FaultPlan",
    "Ftl",
    "FtlError",
    "Nand",
    "NandRuleError",
    "OutOfSpace",
    "PagePlan",
    "ReadOnly",
    "Uncorrectable",
    "UnknownSequence",
]
