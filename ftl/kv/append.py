"""Append: full groups are programmed to flash, the rows of unfinished groups stay in drive DRAM.

All pages are programmed before any mapping or buffer changes, so that a rejected append leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from csd_spec.arrays import F16, I64, U16, U32
from csd_spec.view import UNMAPPED, in_flash
from ftl.errors import OutOfSpaceError, UncorrectableReadError
from ftl.flash.tag import MAX_GROUPS
from ftl.kv.layouts import GroupMap, round_to_codec
from ftl.kv.layouts.group_map import POISON
from ftl.kv.map import KvMap
from ftl.kv.sequence import Rows, Sequence


def append(
    kv: KvMap, handles: Seq[int], layer: int, lengths: I64, k: F16 | None, v: F16 | None, start_ns: int
) -> tuple[int, int]:
    """Append rows to one layer; full groups are programmed, the rest stays in drive DRAM.

    If drive DRAM is full, an unfinished group of a copy is not buffered; the primary map keeps its rows.

    Args:
        handles: Sequences, B of them.
        lengths: Rows per sequence, (B,) int64.
        k, v: Rows of all sequences, (sum(lengths), H, d) as FP16 bit patterns; None without payload.
        start_ns: Simulated time of the command, ns.

    Returns:
        Number of pages programmed, and the simulated time at which the last program ends, ns.

    Raises:
        OutOfSpaceError: Flash or drive DRAM is full; nothing has changed.
        ReadOnlyError: Too many blocks are bad.
    """
    plan = kv.plan(handles, layer)
    if set(lengths.tolist()) == {1} and plan.in_bounds():
        kv.store.placement.check_alive()
        plan.append(k, v)
        kv.changes.dirty.update(handles)
        return 0, start_ns
    seqs = plan.seqs
    kv.invalidate_plans()
    allocated = _allocate(kv, seqs, layer, lengths, start_ns)
    cut, finish_ns = np.cumsum(lengths)[:-1], start_ns
    new_k, new_v = (
        [None] * len(seqs) if rows is None else np.split(round_to_codec(seqs[0].layout, rows).view(np.uint16), cut)
        for rows in (k, v)
    )
    new: list[Rows] = [{"k": mine_k, "v": mine_v} for mine_k, mine_v in zip(new_k, new_v, strict=True)]
    growths = [_LayerAppend(kv, seq, layer, int(length)) for seq, length in zip(seqs, lengths, strict=True)]
    try:
        for growth, rows, ppns in zip(growths, new, allocated, strict=True):
            if ppns.size:
                finish_ns = max(finish_ns, growth.program(rows, ppns, start_ns))
    except (OutOfSpaceError, UncorrectableReadError):
        kv.store.placement.undo_allocation(np.concatenate(allocated))
        for seq in seqs:  # programmed pages keep their tags until erased, and tags are unique
            kv.change_owner(seq)
        raise
    for growth, rows, ppns in zip(growths, new, allocated, strict=True):
        growth.map(rows, ppns)
    kv.changes.dirty.update(handles)
    pages = sum(ppns.size for ppns in allocated)
    kv.store.counters.groups += pages
    return pages, finish_ns


def _allocate(kv: KvMap, seqs: Seq[Sequence], layer: int, lengths: I64, start_ns: int) -> list[U32]:
    """Allocate pages for the groups that become full, and check that drive DRAM has room for the rest."""
    tokens = max(int(seq.lengths[layer] + length) for seq, length in zip(seqs, lengths, strict=True))
    limit = MAX_GROUPS * seqs[0].layout.n
    if tokens >= limit:
        raise OutOfSpaceError(f"{tokens} tokens: a sequence has at most {limit - 1}")
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
    kv.open_groups.check_room(buffers)
    return kv.store.allocate(jobs, start_ns)


def _new_groups(seq: Sequence, mapped: GroupMap, layer: int, length: int) -> I64:
    """Groups that become full when `length` tokens are appended, (1, groups)."""
    now = int(seq.lengths[layer])
    return np.arange(now // mapped.per_group, (now + length) // mapped.per_group)[None, :]


class _LayerAppend:
    """Append of `tokens` tokens to one layer of one sequence."""

    def __init__(self, kv: KvMap, seq: Sequence, layer: int, tokens: int) -> None:
        self.kv, self.seq, self.layer, self.tokens = kv, seq, layer, tokens
        self.length = int(seq.lengths[layer])

    def program(self, rows: Rows, ppns: U32, start_ns: int) -> int:
        """Program the groups that become full, and update ppns; returns when the last program ends, ns."""
        kv, seq, layer = self.kv, self.seq, self.layer
        owner, tags, order = seq.owners[layer][-1][0], [], np.argsort(ppns, kind="stable")
        place, taken = np.argsort(order), 0  # in program order
        pages = np.empty((ppns.size, kv.open_groups.content.shape[1]), np.uint16) if kv.store.nand.payload else None
        for mapped in seq.maps.values():
            groups = _new_groups(seq, mapped, layer, self.tokens).ravel()
            if groups.size and mapped.programmed:
                tags.append(mapped.tags(owner, layer, groups).ravel())
                at = place[taken : taken + tags[-1].size].reshape(mapped.streams, -1)
                taken += at.size
                new = _source_rows(rows, mapped.source)
                start_ns = self._pack(mapped, pages, at, new, int(groups[0]) * mapped.per_group, start_ns)
        assert taken == ppns.size, f"{ppns.size} pages are allocated, {taken} are packed"
        ordered = ppns[order]
        try:
            content = None if pages is None else pages.view(np.uint8)
            return kv.store.program(seq.writer, ordered, content, np.concatenate(tags)[order], start_ns)
        finally:
            ppns[order] = ordered

    def _pack(self, mapped: GroupMap, pages: U16 | None, at: I64, new: U16 | None, first: int, start_ns: int) -> int:
        """Pack the groups that become full, from token `first` on, into pages[at]; returns when their rows are read."""
        length = self.length
        assert first <= length + self.tokens, "a group begins after the last token"
        if first < length and (mapped.rebuilt or not mapped.buffered(self.layer)):
            old, start_ns = self._read_rows(mapped.source, first, start_ns)
            if new is not None and old is not None:
                new, length = np.concatenate([old, new]), first
        if pages is not None and new is not None:
            pack_full_groups(self.kv, mapped, self.layer, length, new, pages, at)
        return start_ns

    def _read_rows(self, source: str, first: int, start_ns: int) -> tuple[U16 | None, int]:
        """Rows from token `first` on, from pages and buffers of primary maps, and when they have been read, ns."""
        slots = self.seq.stored_in(source, self.layer, range(first, self.length))
        end_ns = self.kv.store.read(self.kv.store.all_of(slots[in_flash(slots)]), start_ns)
        if not self.kv.store.nand.payload:
            return None, end_ns
        return self.kv.rows(self.seq, source, self.layer, range(first, self.length)), end_ns

    def map(self, rows: Rows, ppns: U32) -> None:
        """Map the new pages, and buffer the remaining rows."""
        assert self.seq.lengths[self.layer] == self.length, "the sequence changed during its append"
        end, taken = self.length + self.tokens, 0
        for mapped in self.seq.maps.values():
            first, last = self.length // mapped.per_group, end // mapped.per_group
            mapped.reserve(-(-end // mapped.per_group))
            size = mapped.streams * (last - first) * mapped.programmed
            assert not in_flash(mapped.slots[self.layer, 0, first:last]).any(), "a full group is mapped already"
            new = ppns[taken : taken + size].reshape(mapped.streams, -1) if mapped.programmed else UNMAPPED
            mapped.slots[self.layer, :, first:last] = new
            taken += size
            left = _source_rows(rows, mapped.source) if mapped.can_buffer(end // mapped.per_group) else None
            self.kv.open_groups.buffer_tail(mapped, self.layer, self.length, self.tokens, left)
        assert taken == ppns.size, f"{ppns.size} pages were programmed, {taken} are mapped"
        self.kv.usage.resize(self.seq, self.length, end)
        self.seq.lengths[self.layer] = end
        self.seq.check_layer(self.layer)


def _source_rows(rows: Rows, source: str) -> U16 | None:
    """Rows of a source: K, V, or both, K first."""
    parts = [rows[name] for name in source]
    if len(parts) == 1:
        return parts[0]
    return None if parts[0] is None else np.concatenate(parts, axis=2)  # type: ignore[arg-type]


def pack_full_groups(kv: KvMap, mapped: GroupMap, layer: int, length: int, rows: U16, pages: U16, at: I64) -> None:
    """Pack the groups that `rows` complete, including buffered rows, into pages[at]; `at` is (streams, groups)."""
    position = length % mapped.per_group
    assert not position or mapped.buffered(layer), f"layer {layer}: the open group has no buffers"
    assert rows.shape[0] >= at.shape[1] * mapped.per_group - position, (
        f"{rows.shape[0]} rows do not fill {at.shape[1]} groups"
    )
    if not mapped.fills_pages:
        pages[at] = POISON
    if position:
        pages[at[:, 0]] = kv.open_groups.content[mapped.buffers[layer]]
    mapped.write(pages, at, position, rows[: at.shape[1] * mapped.per_group - position])
