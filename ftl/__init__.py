"""The flash translation layer: K and V groups in modelled NAND, and the modelled time of reaching them.

It maps (sequence, layer, head, group) straight to a physical page: no file system and no block layer on top.
What the groups are used for is not known here.
"""

from csd_io.medium import IN_MEMORY, Medium
from ftl.door import Ftl
from ftl.errors import (
    FtlError,
    KeyExistsError,
    MediumFailed,
    NandRuleError,
    OutOfSpace,
    ReadOnly,
    Uncorrectable,
    UnknownKeyError,
    UnknownSequence,
)
from ftl.flash.faults import FaultPlan
from ftl.flash.nand import Nand
from ftl.flash.pipeline import Fetch, Link, Use
from ftl.flash.plan import PagePlan
from ftl.flash.timing import TIMINGS, FlashTiming, Listener
from ftl.kv.layouts import kept, maps_of, token_bytes

__all__ = [
    "IN_MEMORY",
    "TIMINGS",
    "FaultPlan",
    "Fetch",
    "FlashTiming",
    "Ftl",
    "FtlError",
    "KeyExistsError",
    "Link",
    "Listener",
    "Medium",
    "MediumFailed",
    "Nand",
    "NandRuleError",
    "OutOfSpace",
    "PagePlan",
    "ReadOnly",
    "Uncorrectable",
    "UnknownKeyError",
    "UnknownSequence",
    "Use",
    "kept",
    "maps_of",
    "token_bytes",
]
