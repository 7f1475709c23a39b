"""KV map: the sequences of a drive, and the locations of their groups."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from csd_spec import PageFormat
from csd_spec.arrays import U16, U32, U64
from csd_spec.view import UNMAPPED, in_flash
from ftl.errors import OutOfSpaceError, UncorrectableReadError, UnknownSequenceError
from ftl.flash import tag
from ftl.flash.placement import GROWTH, Writer
from ftl.flash.references import Reference, Referrer
from ftl.flash.store import FlashStore
from ftl.kv.group_buffers import GroupBuffers, OpenGroups
from ftl.kv.layer_plan import LayerPlan
from ftl.kv.owners import Owners
from ftl.kv.prefix_index import RECORDED_BYTES, PrefixIndex
from ftl.kv.sequence import Sequence
from ftl.kv.share_counts import SharedPages
from ftl.kv.usage import Accounts

MAX_PLANS = 1 << 12


@dataclass(slots=True)
class Changes:
    """Handles of sequences whose changes are not yet in the journal.

    Attributes:
        dirty: Changed sequences.
        named: Sequences, including freed ones, whose keys changed. They are recorded together; otherwise a key could
            belong to two sequences, or to none.
        trimmed: Changed sequences that invalidated pages.
        freed: Freed sequences.
    """

    dirty: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    trimmed: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)


class KvMap(Referrer):
    """Sequences over a flash store. `append` and `fork_crop` change groups and record the changes for the journal."""

    def __init__(self, store: FlashStore, dram_bytes: int) -> None:
        self.store = store
        self.sequences: dict[int, Sequence] = {}
        self.buffers = GroupBuffers(dram_bytes, store.geometry.page_bytes)
        self.open_groups = OpenGroups(self.buffers, store.nand.read)
        self.owners, self.changes = Owners(), Changes()
        self.names = PrefixIndex()
        self.usage = Accounts()
        self.shared = SharedPages(store.geometry.pages)
        self.next_handle = 1
        self.plans: dict[tuple[tuple[int, ...], int], LayerPlan] = {}  # by handles and layer

    def plan(self, handles: Seq[int], layer: int) -> LayerPlan:
        """Return the cached plan for a layer of sequences; raises as `sequence`."""
        key = tuple(handles), layer
        plan = self.plans.get(key)
        if plan is None:
            plan = LayerPlan([self.sequence(handle) for handle in handles], layer, self.banks)
            if len(self.plans) >= MAX_PLANS:
                self.invalidate_plans()
            self.plans[key] = plan
        return plan

    def invalidate_plans(self) -> None:
        """End the epoch before slots or buffers change, or sequences are created, freed or fail."""
        for plan in self.plans.values():
            plan.user_data.clear()  # it refers to the plan, and the plan to all pages
        self.plans.clear()

    @property
    def banks(self) -> tuple[U16, U16]:
        """Flash content and page buffers, the two banks of a slot number."""
        return self.store.content, self.open_groups.content

    def rows(self, seq: Sequence, source: str, layer: int, tokens: range) -> U16:
        """Rows (tokens, H, d) of K or V as stored; (tokens, H, 2 d) of both. Raises UncorrectableReadError."""
        slots = seq.stored_in(source, layer, tokens)
        self.store.page_in(slots[in_flash(slots)])
        return seq.rows(self.banks, source, layer, tokens)

    def sequence(self, handle: int) -> Sequence:
        """Return the sequence of a handle; raises UnknownSequenceError, or UncorrectableReadError if it lost data."""
        seq = self.sequences.get(handle)
        if seq is None:
            raise UnknownSequenceError(f"no sequence {handle} on this drive")
        if seq.kept:
            raise UncorrectableReadError([handle], why="its layout is not loaded: free it, or open the drive with it")
        if seq.failed:
            raise UncorrectableReadError([handle])
        return seq

    def create(self, count: int, layers: int, heads: int, layout: PageFormat, label: int = 0) -> list[int]:
        """Create empty sequences with a label; returns their handles."""
        if len(self.owners.sharers) + count > tag.MAX_OWNERS // 2:  # the other half is for truncations
            raise OutOfSpaceError(
                f"{count} sequences more than {len(self.sequences)}: a drive has {tag.MAX_OWNERS // 2}"
            )
        handles = list(range(self.next_handle, self.next_handle + count))
        assert self.sequences.keys().isdisjoint(handles), f"handles {handles[0]} to {handles[-1]} are in use"
        self.next_handle += count
        for handle in handles:
            seq = Sequence(handle, layout, layers, heads, Writer(self.store.geometry.channels, GROWTH, lends=True))
            seq.label = label
            self.sequences[handle] = seq
            self.usage.add(seq)
            self.change_owner(seq)
        self.changes.dirty.update(handles)
        return handles

    def change_owner(self, seq: Sequence) -> None:
        """Give a sequence a new owner number for its further writes."""
        before = seq.all_owners - {-1}
        seq.newest = self.owners.new(seq.handle, self.store.nand.writes)
        for layer in range(seq.layers):
            seq.write_as(layer, seq.newest, int(seq.lengths[layer]))
        self.owners.release(before - seq.all_owners, seq.handle)
        self.check_owners(seq)

    def check_owners(self, seq: Sequence) -> None:
        """Assert that every owner of a sequence's pages lists the sequence."""
        assert all(seq.handle in self.owners.sharers[owner] for owner in seq.all_owners), f"{seq.handle}: owners"

    def unmap(self, seq: Sequence, name: str, layer: int | slice, first: int) -> None:
        """Unmap a layer's groups of one map from `first` on. Pages that another sequence shares stay valid."""
        self.invalidate_plans()
        slots = seq.maps[name].slots[layer, ..., first:]
        pages = slots[in_flash(slots)]
        self.store.placement.invalidate(pages[self.shared.release(pages)])
        slots[:] = UNMAPPED

    def forget(self, seq: Sequence) -> None:
        """Remove a sequence and invalidate its pages."""
        self.names.unbind(seq.label, list(seq.names))
        self.usage.remove(seq)
        self.store.placement.close(seq.writer)
        for name, mapped in seq.maps.items():
            self.unmap(seq, name, slice(None), 0)
            self.open_groups.release_all(mapped)
        if seq.kept:
            self.store.placement.invalidate(seq.kept.pages[self.shared.release(seq.kept.pages)])
        assert not seq.names and seq.handle not in self.changes.freed
        del self.sequences[seq.handle]
        self.owners.release(seq.all_owners, seq.handle)
        self.changes.dirty.discard(seq.handle)
        self.changes.freed.add(seq.handle)

    # Referrer interface

    def references(self, tags: U64) -> Iterator[Reference]:
        """Slots of the sequences that share the owners of these tags."""
        kinds, owners, (layers, streams, groups) = tag.kinds(tags), tag.owners(tags), tag.group_places(tags)
        ours = tag.is_group(tags)
        for owner in np.unique(owners[ours]).tolist():
            seqs = [self.sequences[handle] for handle in self.owners.sharers.get(owner, ())]
            for pages in (seq.kept.pages for seq in seqs if seq.kept):
                yield Reference(pages, np.flatnonzero(ours & (owners == owner)), None)
            for mapped in (mapped for seq in seqs for mapped in seq.maps.values()):
                slots = mapped.slots  # skip pages of an earlier owner with this number
                inside = (layers < slots.shape[0]) & (streams < slots.shape[1]) & (groups < slots.shape[2])
                here = ours & (owners == owner) & (kinds == mapped.kind) & inside
                which = np.flatnonzero(here)
                yield Reference(slots, which, (layers[which], streams[which], groups[which]))

    def moved(self, old: U32, new: U32) -> None:
        self.shared.moved(old, new)
        self.invalidate_plans()

    def checkpoint_pages(self) -> int:
        """At most one page per unfinished KV group, plus sums of V and names, in two copies."""
        tables, names = self.usage.total.table_bytes, self.names.count * RECORDED_BYTES  # includes sums of V
        return 2 * (-(-self.usage.total.tails * 3 // 4) + -(-(tables + names) // self.store.geometry.page_bytes))

    def lose(self, tags: U64, for_good: bool) -> list[int]:
        """Mark the sequences that hold these pages as failed."""
        handles = sorted(self.owners.sequences(set(tag.owners(tags[tag.is_group(tags)]).tolist())))
        self.invalidate_plans()
        for handle in handles:
            self.sequences[handle].failed = True
        if for_good:
            self.changes.dirty.update(handles)
            self.changes.trimmed.update(handles)
        return handles
