"""Shared data types of vcsd: drive descriptions, commands, completions, KV layouts and views.

Everything here is an immutable value. This package imports no other package of the project.
"""

from csd_spec.attention import NAMED, Attention
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
from csd_spec.device import Device, DeviceError
from csd_spec.drive import BlockSsdSpec, DriveSpec, EngineSpec, Geometry, Link, NandTiming
from csd_spec.layouts import LAYOUTS, Group, Layout, PageForm, load_layouts
from csd_spec.model import ModelShape
from csd_spec.sparf import Budget, Compression, Fixed, SparFParams
from csd_spec.status import Status
from csd_spec.view import KvView

__all__ = [
    "LAYOUTS",
    "NAMED",
    "Attend",
    "Attention",
    "BlockSsdSpec",
    "Budget",
    "Codec",
    "Command",
    "Completion",
    "Compression",
    "Device",
    "DeviceError",
    "DriveSpec",
    "EngineSpec",
    "Fixed",
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
    "KvList",
    "KvName",
    "KvRead",
    "KvView",
    "Layout",
    "Link",
    "LogPage",
    "ModelShape",
    "NandTiming",
    "PageForm",
    "SeqCreate",
    "SeqFork",
    "SeqSweep",
    "SparFParams",
    "Status",
    "load_layouts",
]
