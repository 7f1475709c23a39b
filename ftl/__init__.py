"""Flash translation layer: KV groups in simulated NAND flash, and the simulated time of each access.

The FTL maps (sequence, layer, head, group) directly to a physical page, without a file system or a block layer.
It does not know how the groups are used. Entry point: `Ftl`.
"""

from csd_io.medium import IN_MEMORY, Medium
from ftl.errors import (
    FtlError,
    KeyExistsError,
    MediaFailedError,
    NandRuleError,
    OutOfSpaceError,
    ReadOnlyError,
    UncorrectableReadError,
    UnknownKeyError,
    UnknownSequenceError,
)
from ftl.facade import Ftl
from ftl.flash.faults import FaultPlan
from ftl.flash.nand import Nand
from ftl.flash.pipeline import CriticalStage, ReadStage, StageTracer, UnitStage
from ftl.flash.plan import PagePlan
from ftl.flash.timing import TIMINGS, FlashOperation, FlashTiming, Listener
from ftl.kv.layouts import maps_of, round_to_codec, token_bytes

__all__ = [
    "IN_MEMORY",
    "TIMINGS",
    "CriticalStage",
    "FaultPlan",
    "FlashOperation",
    "FlashTiming",
    "Ftl",
    "FtlError",
    "KeyExistsError",
    "Listener",
    "MediaFailedError",
    "Medium",
    "Nand",
    "NandRuleError",
    "OutOfSpaceError",
    "PagePlan",
    "ReadOnlyError",
    "ReadStage",
    "StageTracer",
    "UncorrectableReadError",
    "UnitStage",
    "UnknownKeyError",
    "UnknownSequenceError",
    "maps_of",
    "round_to_codec",
    "token_bytes",
]
