"""Another form for a sequence: the embedding-indexed copy of K, written anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from csd_spec import KvLayout
from ftl.append import full_pages, keep
from ftl.errors import OutOfSpace
from ftl.groups import embedding_map

if TYPE_CHECKING:
    from ftl.kv import Ftl


def relayout(ftl: Ftl, handle: int, m: int, bits: int, start_ns: int) -> int:
    """Read K of a sequence and write its embedding-indexed copy with m channels of `bits` bits a page.

    Returns when that is done. Raises OutOfSpace before anything changes. Relatives keep the copy that they share.
    """
    seq = ftl.sequence(handle)
    layout = KvLayout(page_bytes=seq.layout.page_bytes, head_dim=seq.layout.head_dim, m=m, bits=bits)
    old, new = seq.embedding_k, embedding_map(layout, seq.layers, seq.heads)
    used = [layer for layer in range(seq.layers) if seq.lengths[layer]]
    finish_ns, groups = start_ns, [np.arange(int(seq.lengths[layer]) // layout.T) for layer in used]
    for layer in used:
        finish_ns = max(finish_ns, ftl.read(ftl.read_back(handle, layer)[2], start_ns))
    starts = [
        ftl.placement.starts(new.stream_numbers(handle, layer), each[None, :], new.scattered).ravel()
        for layer, each in zip(used, groups, strict=True)
    ]
    allocated = ftl.allocate([(seq.writer, part) for part in starts], ftl.reserve, start_ns)
    rows = [ftl.read_back(handle, layer)[0].view(np.uint16) for layer in used]
    try:
        for i, layer in enumerate(used):
            owners = [seq.owner_of(layer, layout.T, int(group)) for group in groups[i]]
            tags = [new.tags(owner, layer, groups[i][j : j + 1]) for j, owner in enumerate(owners)]
            if owners:
                data = full_pages(ftl, new, layer, 0, rows[i])
                end_ns = ftl.program(seq.writer, allocated[i], data, np.hstack(tags).ravel(), start_ns)
                finish_ns = max(finish_ns, end_ns)
    except OutOfSpace:
        ftl.placement.give_back(np.concatenate(allocated))
        raise
    ftl.buffers.release(old.buffers[old.buffers >= 0])
    old.buffers[:] = -1
    for i, layer in enumerate(used):
        new.reserve(-(-rows[i].shape[0] // layout.T))
        new.slots[layer, :, : groups[i].size] = allocated[i].reshape(new.streams, -1)
        keep(ftl, new, layer, 0, rows[i].shape[0], rows[i])
        ftl.counters.groups += allocated[i].size
    for layer in used:
        ftl.drop(seq, old, layer, 0)
    seq.layout, seq.embedding_k = layout, new
    ftl.dirty.add(handle)
    ftl.shrunk.add(handle)
    return finish_ns
