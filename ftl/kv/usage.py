"""How much of a drive the sequences of each label use, kept up to date by what changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from csd_spec import PageForm
from ftl.kv.sequence import Sequence


@dataclass(slots=True)
class Usage:
    """What some sequences use.

    It follows from the tokens of each: a page that forks share counts for every one of them, since each may outlive
    the others.

    Attributes:
        sequences: Number of them.
        table_bytes: Their tables in drive DRAM, bytes.
        pages: Flash pages of their full groups.
        buffers: Page buffers in drive DRAM of their unfinished groups; copies, which give way to others, have none.
        tails: Rows of K and V that a checkpoint records at most.
    """

    sequences: int = 0
    table_bytes: int = 0
    pages: int = 0
    buffers: int = 0
    tails: int = 0

    def add(self, other: Usage, times: int = 1) -> None:
        """Count what others use too, or with -1 no longer."""
        self.sequences += times * other.sequences
        self.table_bytes += times * other.table_bytes
        self.pages += times * other.pages
        self.buffers += times * other.buffers
        self.tails += times * other.tails


def table_bytes(layers: int, heads: int, layout: PageForm) -> int:
    """Bytes of a sequence's tables in drive DRAM: a sum of V unless rows are opaque, and a slot and a buffer for each
    stream."""
    coarse = layout.progressive is not None  # pages of K and of V in few bits, and one in 8 bits
    streams = 2 + layout.embedding_pages * (1 + coarse) + coarse
    return layers * heads * (4 * layout.head_dim * (not layout.opaque) + 12 * streams)


def usage_of(seq: Sequence, lengths: Seq[int]) -> Usage:
    """What a sequence uses with `lengths` tokens in its layers."""
    found = Usage(1, table_bytes(seq.layers, seq.heads, seq.layout))
    for tokens, layers in Counter(lengths).items():
        found.add(layer_usage(seq, tokens), layers)
    return found


def layer_usage(seq: Sequence, tokens: int) -> Usage:
    """What a layer of a sequence uses with so many tokens."""
    pages = sum([each.streams * (tokens // each.per_group) for each in seq.maps.values() if each.programmed])
    buffers = sum([each.streams for each in seq.primary.values() if tokens % each.per_group])
    waits = tokens > 0 and seq.layout.n > 1  # else every row is a group
    return Usage(pages=pages, buffers=buffers, tails=2 * seq.heads * waits)


class Accounts:
    """What the sequences of each label use, and all of them.

    Attributes:
        total: Of all sequences.
    """

    def __init__(self) -> None:
        self.total = Usage()
        self._by_label: dict[int, Usage] = {}

    def of(self, label: int) -> Usage:
        """What a label's sequences use."""
        return self._by_label.setdefault(label, Usage())

    def by_label(self) -> list[tuple[int, Usage]]:
        """Labels, and what the sequences of each use."""
        return list(self._by_label.items())

    def add(self, seq: Sequence) -> None:
        """Count a sequence."""
        self._count(seq, usage_of(seq, seq.lengths.tolist()), 1)

    def remove(self, seq: Sequence) -> None:
        """Count a sequence no longer."""
        self._count(seq, usage_of(seq, seq.lengths.tolist()), -1)

    def resize(self, seq: Sequence, before: int, after: int) -> None:
        """A layer has `after` tokens instead of `before`."""
        self._count(seq, layer_usage(seq, before), -1)
        self._count(seq, layer_usage(seq, after), 1)

    def _count(self, seq: Sequence, usage: Usage, times: int) -> None:
        self.total.add(usage, times)
        self.of(seq.label).add(usage, times)
