"""Commands and completions. One command covers many sequences of one layer; `csd_spec.verbs` has a row for each.

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

METHOD_BYTES = 32  # of a method's name


class LogPage(IntEnum):
    """Log identifiers: NVMe's own below C0h, then vendor specific ones."""

    ERROR = 0x01
    SMART = 0x02
    WEAR = 0xC0
    LATENCY = 0xC1
    PROGRAMS = 0xC2
    NAMESPACE = 0xC3


@dataclass(frozen=True, slots=True)
class SeqCreate:
    """Open `count` sequences; the completion's data is their handles, (count,) uint64.

    layout: Code of the layout in which K and V are stored (`csd_spec.layouts`).
    """

    count: int
    layers: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    layout: int = 16


@dataclass(frozen=True, slots=True)
class KvAppend:
    """Add tokens to one layer of sequences: tokens of sequence b are the next lengths[b] rows of k and v."""

    seqs: tuple[int, ...]
    layer: int
    lengths: I64  # (B,)
    k: F16  # (sum of lengths, H, d)
    v: F16  # (sum of lengths, H, dv): dv = d, or 0 where V is a part of K


@dataclass(frozen=True, slots=True)
class Attend:
    """One decode step of one layer: store k and v of the new token, then attend over everything stored.

    method: the name of one that the drive knows. r, top_k and recent are SparF's parameters; other methods take their
    bytes as a budget, or ignore them. The completion's data is the output, (B, H, G, d) float16, and rows, (B, H, G, 2)
    float32: of each query head m, the largest logit attended, and l, so that l * e^m is the softmax weight that the
    output stands for; l = 0 where that is not known.

    terms: of each query head scale, cap, sink and slope. A logit is cap * tanh(scale * q k / cap) - slope * distance,
    where distance is how many tokens are stored behind the one that is attended. The softmax is over the logits and
    the sink, whose weight takes part in m and l and has no V. Without terms a logit is q k / sqrt(d); so it is with the
    scale 1/sqrt(d), an infinite cap, a sink of -infinity and no slope.
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
    """Read K and V of one layer back: the completion's data is k, v, each (sum of tokens, H, d) float16.

    Of each sequence come `tokens` tokens from number `first` on, all where that is 0; and only as far as there are.
    """

    seqs: tuple[int, ...]
    layer: int
    first: int = 0
    tokens: int = 0

    @staticmethod
    def of(length: int, first: int, tokens: int) -> range:
        """The tokens that come of a sequence of `length`."""
        end = min(first + tokens, length) if tokens else length
        return range(min(first, end), end)


@dataclass(frozen=True, slots=True)
class KvCrop:
    """Keep the first lengths[b] tokens of one layer."""

    seqs: tuple[int, ...]
    layer: int
    lengths: I64  # (B,)


@dataclass(frozen=True, slots=True)
class KvFree:
    """Forget sequences; their flash becomes free."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeqFork:
    """Sequences that begin with the first lengths[b] tokens of each layer of these, or as many as there are; the
    completion's data is their handles, (B,) uint64. Full groups are shared with those that they begin as, unfinished
    ones are copied in drive DRAM."""

    seqs: tuple[int, ...]
    lengths: I64  # (B,)


@dataclass(frozen=True, slots=True)
class KvName:
    """Let a sequence's first tokens[i] tokens of all layers be found under keys[i]; a key that was given before moves.

    A name lasts until its tokens are cropped or freed, and survives a loss of power where they do.
    """

    seqs: tuple[int, ...]  # one
    tokens: I64  # (N,)
    keys: Keys  # (N,)


@dataclass(frozen=True, slots=True)
class KvExist:
    """Look up keys, up to the first that names nothing: the completion's data is a handle, (N,) uint64, and tokens,
    (N,) int64, of each; zeros from the first miss on."""

    keys: Keys  # (N,)


@dataclass(frozen=True, slots=True)
class KvDrop:
    """Forget names; what they named stays. Keys that name nothing are passed over."""

    keys: Keys  # (N,)


@dataclass(frozen=True, slots=True)
class KvList:
    """Names in the order of their keys, `count` of them after one: the completion's data is keys, handles (uint64) and
    tokens (int64), each (count,); zeros where there are no more."""

    after: Keys  # (1,)
    count: int


@dataclass(frozen=True, slots=True)
class SeqSweep:
    """Free the tenant's sequences of which nothing has a name: what a host was storing when it died. The completion's
    data is how many, (1,) int64."""


@dataclass(frozen=True, slots=True)
class KvGather:
    """Read ranges of several sequences and layers back at once: the completion's data is k, v, each (layers, sum of
    tokens, H, d) float16, of each layer from `layer` on the tokens[b] tokens of sequence b from first[b] on.

    Each range must be stored in all of these layers.
    """

    seqs: tuple[int, ...]
    first: I64  # (B,)
    tokens: I64  # (B,)
    layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Complete once every program that was begun has ended."""


@dataclass(frozen=True, slots=True)
class GetLog:
    """Read a log page; the completion's data is JSON text, uint8."""

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
    """Flash traffic of a command. useful_bytes is what passed the NFC filter; fetched_bytes what crossed the
    channels to bring it."""

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
    """The answer to a command. Times are modelled; the breakdown's parts add up to finish_ns - submit_ns."""

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
