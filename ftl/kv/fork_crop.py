"""Fork, truncate and free sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from csd_spec.arrays import U16, U32
from csd_spec.view import UNMAPPED, in_flash
from ftl.errors import UnknownSequenceError
from ftl.kv.layouts import GroupMap
from ftl.kv.map import KvMap
from ftl.kv.sequence import Sequence


def fork(kv: KvMap, handle: int) -> int:
    """Create a copy of a sequence: full groups are shared, unfinished groups are copied. Returns its handle."""
    parent = kv.sequence(handle)
    kv.invalidate_plans()
    kv.open_groups.check_room(sum(int((mapped.buffers >= 0).sum()) for mapped in parent.primary.values()))
    (child_handle,) = kv.create(1, parent.layers, parent.heads, parent.layout)
    child = kv.sequences[child_handle]
    for name, theirs in parent.maps.items():
        ours = child.maps[name]
        ours.slots = theirs.slots.copy()
        ours.slots[~in_flash(ours.slots)] = UNMAPPED
        kv.shared.share(ours.flash_slots())
        for layer in np.flatnonzero(theirs.buffers[:, 0] >= 0).tolist():
            # Allocating a buffer for the fork may have evicted the parent's copy
            copied = theirs.buffered(layer) and kv.open_groups.buffer_group(ours, layer, int(parent.lengths[layer]))
            if copied and kv.store.nand.payload:
                kv.buffers.content[ours.buffers[layer]] = kv.buffers.content[theirs.buffers[layer]]
    assert not child.lengths.any() and not child.names
    kv.usage.remove(child)
    child.label = parent.label
    child.v_sums = None if parent.v_sums is None else parent.v_sums.copy()
    child.lengths[:] = parent.lengths
    kv.usage.add(child)
    for layer in range(parent.layers):
        child.owners[layer] = list(parent.owners[layer])
        child.write_as(layer, child.newest, int(parent.lengths[layer]))
        child.check_layer(layer)
    kv.owners.share(child.all_owners, child_handle)
    kv.check_owners(child)
    return child_handle


def crop(kv: KvMap, handle: int, layer: int, length: int, start_ns: int) -> int:
    """Truncate a layer to `length` tokens; a group that is cut returns to drive DRAM.

    Returns:
        Simulated time at which it is there, ns.
    """
    seq = kv.sequence(handle)
    finish_ns, was_in_flash = start_ns, False
    if length >= seq.lengths[layer]:
        return finish_ns
    primary = seq.primary.values()
    kv.open_groups.check_room(sum(m.streams for m in primary if length % m.per_group and not m.buffered(layer)))
    cuts = {name: mapped.slots[layer, :, length // mapped.per_group].copy() for name, mapped in seq.maps.items()}
    rows = {name: _cut_rows(kv, seq, name, layer, length) for name, mapped in seq.maps.items() if not mapped.programmed}
    holders = {mapped.holder for mapped in primary}
    for name, mapped in seq.maps.items():
        reopened = mapped.can_buffer(length // mapped.per_group) or mapped in holders
        if length % mapped.per_group and in_flash(cuts[name][0]) and reopened:
            finish_ns = max(finish_ns, kv.store.read(kv.store.all_of(cuts[name]), start_ns))
    for name, mapped in seq.maps.items():
        was_in_flash |= bool(in_flash(mapped.slots[layer, :, length // mapped.per_group :]).any())
        kv.unmap(seq, name, layer, length // mapped.per_group)
        if in_flash(cuts[name][0]) or mapped.buffered(layer) or name in rows:  # otherwise only the primary map holds it
            _take_back(kv, mapped, layer, length, cuts[name], rows.get(name))
    kv.usage.resize(seq, int(seq.lengths[layer]), length)
    seq.lengths[layer] = length
    seq.check_layer(layer)
    kv.names.crop(seq, length)
    kv.changes.trimmed.add(handle)
    kv.changes.dirty.add(handle)
    if was_in_flash:
        _write_anew(kv, seq, layer, length)
    return finish_ns


def _cut_rows(kv: KvMap, seq: Sequence, name: str, layer: int, length: int) -> U16 | None:
    """Rows (t, H, d) of the group that is cut at `length`, if they have no page of their own to copy."""
    per = seq.maps[name].per_group
    if not kv.store.nand.payload or length // per == seq.lengths[layer] // per:
        return None
    return kv.rows(seq, name, layer, range(length // per * per, length))


def _take_back(kv: KvMap, mapped: GroupMap, layer: int, length: int, cut: U32, rows: U16 | None) -> None:
    """Buffer the rest of the group at slots `cut`; `rows` gives its content if it has no pages."""
    if kv.open_groups.buffer_group(mapped, layer, length) and kv.store.nand.payload:
        if rows is not None:
            mapped.fill(kv.open_groups.content, mapped.buffers[layer], 0, rows)
        elif in_flash(cut[0]):
            kv.buffers.content[mapped.buffers[layer]] = kv.store.nand.read(cut)
        mapped.fill_nan(kv.open_groups.content, mapped.buffers[layer], length % mapped.per_group)


def _write_anew(kv: KvMap, seq: Sequence, layer: int, length: int) -> None:
    """Give a truncated layer a new owner: its groups from here on are written again, and tags must be unique."""
    before = seq.all_owners
    if seq.owners[layer][-1][0] == seq.newest:
        seq.newest = kv.owners.new(seq.handle, kv.store.nand.writes)
    seq.write_as(layer, seq.newest, length)
    assert seq.owners[layer][-1] == (seq.newest, -1) and seq.newest in kv.owners.first_write
    kv.owners.release(before - seq.all_owners, seq.handle)
    kv.check_owners(seq)


def free(kv: KvMap, handles: Seq[int]) -> None:
    """Free sequences; blocks that hold no other data are erased after the next journal record."""
    for handle in handles:
        if handle not in kv.sequences:
            raise UnknownSequenceError(f"no sequence {handle} on this drive")
    for handle in handles:
        kv.forget(kv.sequences[handle])
