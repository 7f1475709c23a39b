"""Commands and completions. One command covers many sequences of one layer; `csd_spec.verbs` describes each command.

Arrays carry FP16 values as numpy float16. Shapes use B sequences, H KV heads of this drive, G query heads per
KV head, d channels, and S or N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import F16, F32, I64, Keys
from csd_spec.status import Status

METHOD_BYTES = 32  # maximum length of a method's name


class LogPage(IntEnum):
    """Log page identifiers: NVMe's below C0h, vendor-specific ones from C0h on."""

    ERROR = 0x01
    SMART = 0x02
    WEAR = 0xC0
    LATENCY = 0xC1
    PROGRAMS = 0xC2
    NAMESPACE = 0xC3


@dataclass(frozen=True, slots=True)
class SeqCreate:
    """Create `count` sequences; returns their handles, (count,) uint64.

    Attributes:
        layout: Code of the layout in which keys and values are stored (`csd_spec.layouts`).
    """

    count: int
    layers: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    layout: int = 16


@dataclass(frozen=True, slots=True)
class KvAppend:
    """Append tokens to one layer: sequence b gets the next lengths[b] rows of k and v."""

    seqs: tuple[int, ...]
    layer: int
    lengths: I64  # (B,)
    k: F16  # (sum of lengths, H, d)
    v: F16  # (sum of lengths, H, dv): dv = d, or 0 if V is a part of K


@dataclass(frozen=True, slots=True)
class Attend:
    """One decode step of one layer: store k and v of the new token, then attend over all stored tokens.

    The completion's data is the output, (B, H, G, d) float16, and rows, (B, H, G, 2) float32: per query head, the
    largest logit m, and l, so that l * e^m is the softmax weight that the output represents; l = 0 if it is unknown.

    A logit is cap * tanh(scale * q k / cap) - slope * distance, where distance is the number of later stored tokens.
    The softmax includes the sink, whose weight counts in m and l and has no V. Without terms, a logit is q k / sqrt(d),
    which equals scale = 1/sqrt(d), cap = infinity, sink = -infinity, slope = 0.

    Attributes:
        method: Name of a method that the drive knows.
        r, top_k, recent: SparF's parameters; other methods take the equivalent bytes as a budget, or ignore them.
        terms: Scale, cap, sink and slope of each query head.
    """

    seqs: tuple[int, ...]
    layer: int
    q: F16  # (B, H, G, d)
    k: F16  # (B, H, d)
    v: F16  # (B, H, dv)
    method: str
    r: int
    top_k: I64  # (B,)
    recent: I64  # (B,)
    terms: F32 | None = None  # (H, G, 4)


@dataclass(frozen=True, slots=True)
class KvRead:
    """Read keys and values of one layer; returns k, v, each (sum of tokens, H, d) float16.

    Each sequence returns `tokens` tokens from index `first` on (0: all), limited to the stored ones.
    """

    seqs: tuple[int, ...]
    layer: int
    first: int = 0
    tokens: int = 0

    @staticmethod
    def of(length: int, first: int, tokens: int) -> range:
        """Range of tokens returned for a sequence of `length` tokens."""
        end = min(first + tokens, length) if tokens else length
        return range(min(first, end), end)


@dataclass(frozen=True, slots=True)
class KvCrop:
    """Truncate one layer to the first lengths[b] tokens."""

    seqs: tuple[int, ...]
    layer: int
    lengths: I64  # (B,)


@dataclass(frozen=True, slots=True)
class KvFree:
    """Free sequences and their flash."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeqFork:
    """Create sequences from the first lengths[b] tokens (or fewer, if fewer are stored) of each layer of others.

    Returns their handles, (B,) uint64. Full groups are shared, unfinished groups are copied in drive DRAM.
    """

    seqs: tuple[int, ...]
    lengths: I64  # (B,)


@dataclass(frozen=True, slots=True)
class KvName:
    """Bind keys[i] to the first tokens[i] tokens of all layers of a sequence; a key that is in use moves.

    A key is valid until its tokens are truncated or freed; it is as durable as the tokens.
    """

    seqs: tuple[int, ...]  # exactly one
    tokens: I64  # (N,)
    keys: Keys  # (N,)


@dataclass(frozen=True, slots=True)
class KvExist:
    """Look up keys, up to the first one that is not bound.

    Returns handles, (N,) uint64, and tokens, (N,) int64; zeros from the first miss on.
    """

    keys: Keys  # (N,)


@dataclass(frozen=True, slots=True)
class KvDrop:
    """Unbind keys; their sequences stay. Unbound keys are ignored."""

    keys: Keys  # (N,)


@dataclass(frozen=True, slots=True)
class KvList:
    """List `count` keys greater than `after`, in order.

    Returns keys, handles (uint64) and tokens (int64), each (count,); zeros past the last key.
    """

    after: Keys  # (1,)
    count: int


@dataclass(frozen=True, slots=True)
class SeqSweep:
    """Free the tenant's sequences without keys, which a host left when it died during a store.

    Returns their number, (1,) int64.
    """


@dataclass(frozen=True, slots=True)
class KvGather:
    """Read ranges of several sequences and layers at once.

    Returns k, v, each (layers, sum of tokens, H, d) float16: for each of `layers` layers from `layer` on, tokens[b]
    tokens of sequence b from first[b] on. Each range must be stored in all of these layers.
    """

    seqs: tuple[int, ...]
    first: I64  # (B,)
    tokens: I64  # (B,)
    layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Complete when all earlier programs have finished."""


@dataclass(frozen=True, slots=True)
class GetLog:
    """Read a log page; returns JSON text, uint8."""

    page: int


Command = (
    SeqCreate
    | SeqFork
    | SeqSweep
    | KvAppend
    | Attend
    | KvRead
    | KvGather
    | KvCrop
    | KvFree
    | KvName
    | KvExist
    | KvList
    | KvDrop
    | Flush
    | GetLog
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashCounters:
    """Flash traffic of a command.

    Attributes:
        fetched_bytes: Bytes that crossed the flash channels.
        useful_bytes: Bytes of these that passed the NFC filter.
    """

    pages_read: int = 0
    pages_programmed: int = 0
    fetched_bytes: int = 0
    useful_bytes: int = 0

    def __add__(self, other: FlashCounters) -> FlashCounters:
        return FlashCounters(
            pages_read=self.pages_read + other.pages_read,
            pages_programmed=self.pages_programmed + other.pages_programmed,
            fetched_bytes=self.fetched_bytes + other.fetched_bytes,
            useful_bytes=self.useful_bytes + other.useful_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Result of a command. Times are simulated; the parts of the breakdown sum to finish_ns - submit_ns."""

    status: Status
    reason: str = ""
    submit_ns: int = 0
    finish_ns: int = 0
    breakdown_ns: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    flash: FlashCounters = FlashCounters()
    link_bytes: int = 0
    data: tuple[NDArray[np.generic], ...] = ()

    @property
    def latency_ns(self) -> int:
        return self.finish_ns - self.submit_ns
