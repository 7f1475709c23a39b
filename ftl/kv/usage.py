"""Drive usage of the sequences of each label, updated incrementally."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from csd_spec import PageFormat
from ftl.kv.sequence import Sequence


@dataclass(slots=True)
class Usage:
    """Usage of some sequences.

    It is a function of their token counts: a page shared by forks counts for each of them, since each may outlive
    the others.

    Attributes:
        sequences: Number of sequences.
        table_bytes: Tables in drive DRAM, bytes.
        pages: Flash pages of full groups.
        buffers: Page buffers in drive DRAM of unfinished groups; buffers of copies can be evicted and do not count.
        tails: Upper bound of the rows of K and V in a checkpoint.
    """

    sequences: int = 0
    table_bytes: int = 0
    pages: int = 0
    buffers: int = 0
    tails: int = 0

    def add(self, other: Usage, times: int = 1) -> None:
        """Add another usage `times` times; -1 subtracts it."""
        self.sequences += times * other.sequences
        self.table_bytes += times * other.table_bytes
        self.pages += times * other.pages
        self.buffers += times * other.buffers
        self.tails += times * other.tails


def table_bytes(layers: int, heads: int, layout: PageFormat) -> int:
    """Bytes of a sequence's tables in drive DRAM: sums of V (unless opaque), and a slot and a buffer per stream."""
    coarse = layout.progressive is not None  # low-bit pages of K and V, and an INT8 page
    streams = 2 + layout.embedding_pages * (1 + coarse) + coarse
    return layers * heads * (4 * layout.head_dim * (not layout.opaque) + 12 * streams)


def usage_of(seq: Sequence, lengths: Seq[int]) -> Usage:
    """Usage of a sequence with these lengths of its layers."""
    usage = Usage(1, table_bytes(seq.layers, seq.heads, seq.layout))
    for tokens, layers in Counter(lengths).items():
        usage.add(layer_usage(seq, tokens), layers)
    return usage


def layer_usage(seq: Sequence, tokens: int) -> Usage:
    """Usage of a layer of a sequence with `tokens` tokens."""
    pages = sum([mapped.streams * (tokens // mapped.per_group) for mapped in seq.maps.values() if mapped.programmed])
    buffers = sum([mapped.streams for mapped in seq.primary.values() if tokens % mapped.per_group])
    waits = tokens > 0 and seq.layout.n > 1  # otherwise every row is a group
    return Usage(pages=pages, buffers=buffers, tails=2 * seq.heads * waits)


class Accounts:
    """Usage of each label's sequences, and of all.

    Attributes:
        total: Usage of all sequences.
    """

    def __init__(self) -> None:
        self.total = Usage()
        self._by_label: dict[int, Usage] = {}

    def of(self, label: int) -> Usage:
        """Usage of a label's sequences."""
        return self._by_label.setdefault(label, Usage())

    def by_label(self) -> list[tuple[int, Usage]]:
        """Labels with the usage of their sequences."""
        return list(self._by_label.items())

    def add(self, seq: Sequence) -> None:
        """Add a sequence."""
        self._count(seq, usage_of(seq, seq.lengths.tolist()), 1)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence."""
        self._count(seq, usage_of(seq, seq.lengths.tolist()), -1)

    def resize(self, seq: Sequence, before: int, after: int) -> None:
        """Change the length of a layer from `before` to `after` tokens."""
        self._count(seq, layer_usage(seq, before), -1)
        self._count(seq, layer_usage(seq, after), 1)

    def _count(self, seq: Sequence, usage: Usage, times: int) -> None:
        own = self.of(seq.label)
        for each in (self.total, own):
            each.add(usage, times)
        assert min(own.sequences, own.table_bytes, own.pages, own.buffers, own.tails) >= 0, f"label {seq.label}: {own}"
        assert own.sequences <= self.total.sequences and own.pages <= self.total.pages
