"""Shared data types of vcsd: drive descriptions, commands, completions, KV layouts and views.

Everything here is an immutable value. This package imports no other package of the project.
"""

from csd_spec.attention import NAMED, AttentionConfig
from csd_spec.codecs import Codec
from csd_spec.commands import (
    Attend,
    Command,
    Completion,
    FlashCounters,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvGather,
    KvList,
    KvName,
    KvRead,
    LogPage,
    SeqCreate,
    SeqFork,
    SeqSweep,
)
from csd_spec.device import Drive, DriveError
from csd_spec.drive import BlockSsdSpec, DriveSpec, EngineSpec, Geometry, Link, NandTiming
from csd_spec.layouts import LAYOUTS, Group, KvLayout, PageFormat, load_layouts
from csd_spec.model import ModelShape
from csd_spec.sparf import CompressionBudget, FixedBudget, SparFParams, SparsityBudget
from csd_spec.status import Status
from csd_spec.view import KvSlotView

__all__ = [
    "LAYOUTS",
    "NAMED",
    "Attend",
    "AttentionConfig",
    "BlockSsdSpec",
    "Codec",
    "Command",
    "Completion",
    "CompressionBudget",
    "Drive",
    "DriveError",
    "DriveSpec",
    "EngineSpec",
    "FixedBudget",
    "FlashCounters",
    "Flush",
    "Geometry",
    "GetLog",
    "Group",
    "KvAppend",
    "KvCrop",
    "KvDrop",
    "KvExist",
    "KvFree",
    "KvGather",
    "KvLayout",
    "KvList",
    "KvName",
    "KvRead",
    "KvSlotView",
    "Link",
    "LogPage",
    "ModelShape",
    "NandTiming",
    "PageFormat",
    "SeqCreate",
    "SeqFork",
    "SeqSweep",
    "SparFParams",
    "SparsityBudget",
    "Status",
    "load_layouts",
]
