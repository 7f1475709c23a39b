"""Append: groups that fill up become pages, rows that do not fill one wait in drive DRAM.

Everything is programmed before any mapping or buffer changes, so that a refused append leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from csd_spec.arrays import F16, I64, U16, U32
from csd_spec.view import UNMAPPED, in_flash
from ftl.errors import OutOfSpace, Uncorrectable
from ftl.flash.tag import MAX_GROUPS
from ftl.kv.layouts import GroupMap, kept
from ftl.kv.layouts.group_map import POISON
from ftl.kv.map import KvMap
from ftl.kv.sequence import Rows, Sequence


def append(
    kv: KvMap, handles: Seq[int], layer: int, lengths: I64, k: F16 | None, v: F16 | None, start_ns: int
) -> tuple[int, int]:
    """Add rows k, v (sum of lengths, H, d) to a layer: full groups go to flash, the rest waits in DRAM.

    Where drive DRAM has no room for an unfinished group of a copy, the primary map alone holds its rows until it is
    full. Returns the number of pages programmed and when the last program ends. Without payload k and v are None.
    """
    plan = kv.plan(handles, layer)
    if set(lengths.tolist()) == {1} and plan.in_bounds():
        kv.store.placement.check_alive()
        plan.append(k, v)
        kv.changes.dirty.update(handles)
        return 0, start_ns
    seqs = plan.seqs
    kv.changed()
    allocated = _allocate(kv, seqs, layer, lengths, start_ns)
    cut, finish_ns = np.cumsum(lengths)[:-1], start_ns
    new_k, new_v = (
        [None] * len(seqs) if rows is None else np.split(kept(seqs[0].layout, rows).view(np.uint16), cut)
        for rows in (k, v)
    )
    new: list[Rows] = [{"k": mine_k, "v": mine_v} for mine_k, mine_v in zip(new_k, new_v, strict=True)]
    growths = [_Growth(kv, seq, layer, int(length)) for seq, length in zip(seqs, lengths, strict=True)]
    try:
        for growth, rows, ppns in zip(growths, new, allocated, strict=True):
            if ppns.size:
                finish_ns = max(finish_ns, growth.program(rows, ppns, start_ns))
    except (OutOfSpace, Uncorrectable):
        kv.store.placement.give_back(np.concatenate(allocated))
        for seq in seqs:  # what was programmed keeps its tags until it is erased, and a tag is written once
            kv.change_owner(seq)
        raise
    for growth, rows, ppns in zip(growths, new, allocated, strict=True):
        growth.map(rows, ppns)
    kv.changes.dirty.update(handles)
    pages = sum(ppns.size for ppns in allocated)
    kv.store.counters.groups += pages
    return pages, finish_ns


def _allocate(kv: KvMap, seqs: Seq[Sequence], layer: int, lengths: I64, start_ns: int) -> list[U32]:
    """Pages for the groups that become full, and the certainty that drive DRAM has room for what does not."""
    tokens = max(int(seq.lengths[layer] + length) for seq, length in zip(seqs, lengths, strict=True))
    limit = MAX_GROUPS * seqs[0].layout.n
    if tokens >= limit:
        raise OutOfSpace(f"{tokens} tokens: a sequence has at most {limit - 1}")
    jobs, buffers = [], 0
    for seq, length in zip(seqs, lengths, strict=True):
        end = int(seq.lengths[layer] + length)
        seq.expect(end)
        buffers += sum(m.streams for m in seq.primary.values() if end % m.per_group and not m.buffered(layer))
        starts = [
            kv.store.placement.starts(
                mapped.stream_numbers(seq.handle, layer), _new_groups(seq, mapped, layer, int(length)), mapped.scattered
            )
            for mapped in seq.maps.values()
            if mapped.programmed
        ]
        jobs.append((seq.writer, np.concatenate([part.ravel() for part in starts])))
    kv.tails.check_room(buffers)
    return kv.store.allocate(jobs, start_ns)


def _new_groups(seq: Sequence, mapped: GroupMap, layer: int, length: int) -> I64:
    """Groups that become full when `length` tokens are added, (1, groups)."""
    now = int(seq.lengths[layer])
    return np.arange(now // mapped.per_group, (now + length) // mapped.per_group)[None, :]


class _Growth:
    """One sequence's layer that gets `tokens` more."""

    def __init__(self, kv: KvMap, seq: Sequence, layer: int, tokens: int) -> None:
        self.kv, self.seq, self.layer, self.tokens = kv, seq, layer, tokens
        self.length = int(seq.lengths[layer])

    def program(self, rows: Rows, ppns: U32, start_ns: int) -> int:
        """Program the groups that become full; returns when the last one is, and where in ppns."""
        kv, seq, layer = self.kv, self.seq, self.layer
        owner, tags, order = seq.owners[layer][-1][0], [], np.argsort(ppns, kind="stable")
        place, taken = np.argsort(order), 0  # in the order in which pages are programmed
        pages = np.empty((ppns.size, kv.tails.content.shape[1]), np.uint16) if kv.store.nand.payload else None
        for mapped in seq.maps.values():
            groups = _new_groups(seq, mapped, layer, self.tokens).ravel()
            if groups.size and mapped.programmed:
                tags.append(mapped.tags(owner, layer, groups).ravel())
                at = place[taken : taken + tags[-1].size].reshape(mapped.streams, -1)
                taken += at.size
                new = _joined(rows, mapped.source)
                start_ns = self._lay(mapped, pages, at, new, int(groups[0]) * mapped.per_group, start_ns)
        ordered = ppns[order]
        try:
            content = None if pages is None else pages.view(np.uint8)
            return kv.store.program(seq.writer, ordered, content, np.concatenate(tags)[order], start_ns)
        finally:
            ppns[order] = ordered

    def _lay(self, mapped: GroupMap, pages: U16 | None, at: I64, new: U16 | None, first: int, start_ns: int) -> int:
        """Lay the groups from token `first` on that become full into pages[at]; returns when what they are made of has
        been read."""
        length = self.length
        if first < length and (mapped.rebuilt or not mapped.buffered(self.layer)):
            old, start_ns = self._read_rows(mapped.source, first, start_ns)
            if new is not None and old is not None:
                new, length = np.concatenate([old, new]), first
        if pages is not None and new is not None:
            lay_full(self.kv, mapped, self.layer, length, new, pages, at)
        return start_ns

    def _read_rows(self, source: str, first: int, start_ns: int) -> tuple[U16 | None, int]:
        """Rows from token `first` on, as primary maps' pages and buffers hold them, and when they have been read."""
        slots = self.seq.stored_in(source, self.layer, range(first, self.length))
        end_ns = self.kv.store.read(self.kv.store.all_of(slots[in_flash(slots)]), start_ns)
        if not self.kv.store.nand.payload:
            return None, end_ns
        return self.kv.rows(self.seq, source, self.layer, range(first, self.length)), end_ns

    def map(self, rows: Rows, ppns: U32) -> None:
        """Let the maps point to new pages, and buffer the rows that are left over."""
        end, taken = self.length + self.tokens, 0
        for mapped in self.seq.maps.values():
            first, last = self.length // mapped.per_group, end // mapped.per_group
            mapped.reserve(-(-end // mapped.per_group))
            size = mapped.streams * (last - first) * mapped.programmed
            mine = ppns[taken : taken + size].reshape(mapped.streams, -1) if mapped.programmed else UNMAPPED
            mapped.slots[self.layer, :, first:last] = mine
            taken += size
            left = _joined(rows, mapped.source) if mapped.waits_in(end // mapped.per_group) else None
            self.kv.tails.buffer_tail(mapped, self.layer, self.length, self.tokens, left)
        assert taken == ppns.size, f"{ppns.size} pages were programmed, {taken} are mapped"
        self.kv.usage.resize(self.seq, self.length, end)
        self.seq.lengths[self.layer] = end


def _joined(rows: Rows, source: str) -> U16 | None:
    """The rows of a source, those of K before those of V."""
    parts = [rows[name] for name in source]
    if len(parts) == 1:
        return parts[0]
    return None if parts[0] is None else np.concatenate(parts, axis=2)  # type: ignore[arg-type]


def lay_full(kv: KvMap, mapped: GroupMap, layer: int, length: int, rows: U16, pages: U16, at: I64) -> None:
    """Lay the groups that `rows` fill, from what waits in the buffers on, into pages[at], `at` (streams, groups)."""
    position = length % mapped.per_group
    if not mapped.fills_pages:
        pages[at] = POISON
    if position:
        pages[at[:, 0]] = kv.tails.content[mapped.buffers[layer]]
    mapped.write(pages, at, position, rows[: at.shape[1] * mapped.per_group - position])
