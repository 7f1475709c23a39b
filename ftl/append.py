"""Append: groups that fill up become pages, rows that do not fill one wait in drive DRAM.

Everything is programmed before any mapping or buffer changes, so that a refused append leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from csd_spec.view import gather_rows
from ftl.errors import OutOfSpace, Uncorrectable
from ftl.groups import DRAM_BANK, MAX_GROUPS, GroupMap
from ftl.nand import ERASED
from ftl.sequence import Sequence

if TYPE_CHECKING:
    from ftl.kv import Ftl

F16 = NDArray[np.float16]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]


def append(
    ftl: Ftl, handles: Seq[int], layer: int, lengths: I64, k: F16 | None, v: F16 | None, start_ns: int
) -> tuple[int, int]:
    """See `Ftl.append`."""
    seqs = [ftl.sequence(handle) for handle in handles]
    tokens = max(int(seq.lengths[layer] + length) for seq, length in zip(seqs, lengths, strict=True))
    if tokens >= MAX_GROUPS * seqs[0].layout.n:
        raise OutOfSpace(f"{tokens} tokens: a sequence has at most {MAX_GROUPS * seqs[0].layout.n - 1}")
    jobs, buffers = [], 0
    for seq, length in zip(seqs, lengths, strict=True):
        end = int(seq.lengths[layer] + length)
        seq.expect(end)
        if end % seq.layout.n and not seq.k.buffered(layer):
            buffers += seq.k.streams + seq.v.streams
        starts = [
            ftl.placement.starts(
                mapped.stream_numbers(seq.handle, layer), _new_groups(seq, mapped, layer, length), mapped.scattered
            )
            for mapped in seq.maps
        ]
        jobs.append((seq.writer, np.concatenate([part.ravel() for part in starts])))
    ftl.check_room(buffers)
    allocated = ftl.allocate(jobs, ftl.reserve, start_ns)
    cut = np.cumsum(lengths)[:-1]
    new_k, new_v = ([None] * len(seqs) if rows is None else np.split(rows.view(np.uint16), cut) for rows in (k, v))
    finish_ns = start_ns
    try:
        for i, seq in enumerate(seqs):
            if allocated[i].size:
                rows = [new_k[i], new_v[i], new_k[i]]
                finish_ns = max(finish_ns, _program(ftl, seq, layer, int(lengths[i]), rows, allocated[i], start_ns))
    except (OutOfSpace, Uncorrectable):
        ftl.placement.give_back(np.concatenate(allocated))
        for seq in seqs:  # what was programmed keeps its tags until it is erased, and a tag is written once
            ftl.succeed(seq)
        raise
    for i, seq in enumerate(seqs):
        _map(ftl, seq, layer, int(lengths[i]), [new_k[i], new_v[i], new_k[i]], allocated[i])
    ftl.dirty.update(handles)
    pages = sum(ppns.size for ppns in allocated)
    ftl.counters.groups += pages
    return pages, finish_ns


def _new_groups(seq: Sequence, mapped: GroupMap, layer: int, length: int) -> I64:
    """Groups that become full when `length` tokens are added, (1, groups)."""
    now = int(seq.lengths[layer])
    return np.arange(now // mapped.per_group, (now + length) // mapped.per_group)[None, :]


def _program(ftl: Ftl, seq: Sequence, layer: int, tokens: int, rows: list[U16 | None], ppns: U32, start_ns: int) -> int:
    """Program the groups of one sequence that become full; returns when the last one is, and where in ppns."""
    length, owner = int(seq.lengths[layer]), seq.owners[layer][-1][0]
    tags, data = [], []
    for mapped, new in zip(seq.maps, rows, strict=True):
        groups = _new_groups(seq, mapped, layer, tokens).ravel()
        if groups.size:
            tags.append(mapped.tags(owner, layer, groups).ravel())
            first = int(groups[0]) * mapped.per_group
            if first < length and not mapped.buffered(layer):
                old, start_ns = _rows_of_k(ftl, seq, layer, first, start_ns)
                if new is not None and old is not None:
                    data.append(full_pages(ftl, mapped, layer, first, np.concatenate([old, new])))
            elif new is not None:
                data.append(full_pages(ftl, mapped, layer, length, new))
    return ftl.program(seq.writer, ppns, np.concatenate(data) if data else None, np.concatenate(tags), start_ns)


def _rows_of_k(ftl: Ftl, seq: Sequence, layer: int, first: int, start_ns: int) -> tuple[U16 | None, int]:
    """K from token `first` on, as its own pages and buffers hold it, and when it has been read."""
    length, n = int(seq.lengths[layer]), seq.layout.n
    slots = seq.k.slots[layer, :, first // n : -(-length // n)]
    end_ns = ftl.read(ftl.whole(slots[slots < DRAM_BANK]), start_ns)
    if not ftl.nand.payload:
        return None, end_ns
    return gather_rows(ftl.banks, slots, length - first // n * n, seq.layout)[first % n :].view(np.uint16), end_ns


def full_pages(ftl: Ftl, mapped: GroupMap, layer: int, length: int, rows: U16) -> U8:
    """Pages (streams * groups, page_bytes) of the groups that `rows` fill, from what waits in the buffers on."""
    per, position = mapped.per_group, length % mapped.per_group
    groups = (length + rows.shape[0]) // per - length // per
    content = ftl.banks[1]
    data = np.full((mapped.streams, groups, content.shape[1]), 0xFFFF, np.uint16)
    head = per - position if position else 0
    if position and groups:
        begun = content[mapped.buffers[layer]]
        mapped.fill(begun, np.arange(mapped.streams), position, rows[:head])
        data[:, 0] = begun
    packed = mapped.pack(rows[head : head + (groups - (position > 0)) * per])
    data[:, groups - packed.shape[1] :, : packed.shape[2]] = packed
    return data.reshape(-1, content.shape[1]).view(np.uint8)


def _map(ftl: Ftl, seq: Sequence, layer: int, tokens: int, rows: list[U16 | None], ppns: U32) -> None:
    """Let the maps point to new pages, and keep the rows that are left over."""
    length, taken = int(seq.lengths[layer]), 0
    for mapped, new in zip(seq.maps, rows, strict=True):
        first, end = length // mapped.per_group, (length + tokens) // mapped.per_group
        mapped.reserve(-(-(length + tokens) // mapped.per_group))
        size = mapped.streams * (end - first)
        mapped.slots[layer, :, first:end] = ppns[taken : taken + size].reshape(mapped.streams, -1)
        taken += size
        keep(ftl, mapped, layer, length, tokens, new)
    seq.lengths[layer] += tokens


def keep(ftl: Ftl, mapped: GroupMap, layer: int, length: int, tokens: int, rows: U16 | None) -> None:
    """Buffer what `tokens` new rows leave in an unfinished group. Embedding groups only where there is room."""
    begins = length % mapped.per_group == 0 or (length + tokens) // mapped.per_group > length // mapped.per_group
    if (begins or mapped.buffered(layer)) and ftl.buffer_group(mapped, layer, length + tokens) and rows is not None:
        position, buffers = (length + tokens) % mapped.per_group, mapped.buffers[layer]
        if begins:
            ftl.buffers.content[buffers] = ERASED
            rows = rows[rows.shape[0] - position :]
        mapped.fill(ftl.banks[1], buffers, position - rows.shape[0], rows)
