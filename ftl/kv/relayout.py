"""Relayout: rewrites a sequence's embedding-indexed copy of K with other channels per page."""

from __future__ import annotations

import numpy as np

from csd_spec import PageFormat
from csd_spec.arrays import U16, U32
from ftl.errors import OutOfSpaceError
from ftl.kv.append import pack_full_groups
from ftl.kv.layouts import channels_map
from ftl.kv.layouts.group_map import GroupMap
from ftl.kv.map import KvMap
from ftl.kv.reader import Reader
from ftl.kv.sequence import Sequence

COPY = "embedding_k"


def relayout(reader: Reader, handle: int, layout: PageFormat, start_ns: int) -> int:
    """Read K of a sequence and rewrite its embedding-indexed copy in another page format with the same rows.

    Forks keep the copy that they share.

    Returns:
        Simulated time at which the copy is written, ns.

    Raises:
        OutOfSpaceError: Nothing has changed.
    """
    kv, store = reader.kv, reader.store
    seq = kv.sequence(handle)
    assert layout.rows == seq.layout.rows and COPY in seq.maps, f"layout {layout.layout.name}: has other rows"
    new = channels_map(layout, seq.layers, seq.heads)
    used = [layer for layer in range(seq.layers) if seq.lengths[layer]]
    finish_ns = start_ns
    for layer in used:
        finish_ns = max(finish_ns, store.read(reader.read_back(handle, layer)[2], start_ns))
    groups = [np.arange(int(seq.lengths[layer]) // layout.T) for layer in used]
    starts = [
        store.placement.starts(new.stream_numbers(handle, layer), group[None, :], new.scattered).ravel()
        for layer, group in zip(used, groups, strict=True)
    ]
    allocated = store.allocate([(seq.writer, part) for part in starts], start_ns)
    rows = [reader.read_back(handle, layer)[0].view(np.uint16) for layer in used]
    try:
        for layer, mine, ppns in zip(used, rows, allocated, strict=True):
            finish_ns = max(finish_ns, _program(kv, seq, new, layer, mine, ppns, start_ns))
    except OutOfSpaceError:
        store.placement.undo_allocation(np.concatenate(allocated))
        raise
    kv.open_groups.release_all(seq.maps[COPY])
    for layer, mine, ppns in zip(used, rows, allocated, strict=True):
        new.reserve(-(-mine.shape[0] // layout.T))
        new.slots[layer, :, : mine.shape[0] // layout.T] = ppns.reshape(new.streams, -1)
        kv.open_groups.buffer_tail(new, layer, 0, mine.shape[0], mine)
        store.counters.groups += ppns.size
    for layer in used:
        kv.unmap(seq, COPY, layer, 0)
    assert (seq.maps[COPY].buffers < 0).all(), f"sequence {handle}: the old copy keeps buffers"
    kv.invalidate_plans()
    kv.usage.remove(seq)
    seq.layout, seq.maps[COPY] = layout, new
    kv.usage.add(seq)
    kv.changes.dirty.add(handle)
    kv.changes.trimmed.add(handle)
    return finish_ns


def _program(kv: KvMap, seq: Sequence, new: GroupMap, layer: int, rows: U16, ppns: U32, start_ns: int) -> int:
    """Program the full groups of one layer; returns when the last program ends, ns."""
    groups = np.arange(rows.shape[0] // new.per_group)
    if not groups.size:
        return start_ns
    owners = [seq.owner_of(layer, new.per_group, int(group)) for group in groups]
    tags = [new.tags(owner, layer, groups[i : i + 1]) for i, owner in enumerate(owners)]
    pages = np.empty((ppns.size, kv.open_groups.content.shape[1]), np.uint16)
    pack_full_groups(kv, new, layer, 0, rows, pages, np.arange(ppns.size).reshape(new.streams, -1))
    return kv.store.program(seq.writer, ppns, pages.view(np.uint8), np.hstack(tags).ravel(), start_ns)
