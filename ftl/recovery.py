"""Power-on: the drive is again as its last commit has it.

Recovery takes the last complete checkpoint and the unbroken run of commits behind it. Every sequence is then as its
last commit has it, exactly, and no flush is lost: pages programmed later are ignored, and no block is erased that a
commit still counts on. Between two flushes sequences are independent of each other: one that was freed may stay freed
though tokens that another got before that are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from csd_spec.arrays import U16, U32, U64
from csd_spec.view import UNMAPPED
from ftl.flash import tag
from ftl.flash.nand import Nand
from ftl.flash.placement import Writer
from ftl.flash.tag import Kind
from ftl.journal import BROKEN, Journal
from ftl.kv.map import KvMap
from ftl.kv.sequence import Sequence
from ftl.record import form_of, tail_bytes, unpack


class Recovery:
    """What is known so far of the array that a drive is powered on with."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.kv, self.store, self.blocks = journal, journal.kv, journal.store, journal.blocks
        programmed = self.store.nand.programmed()
        tags = self.store.nand.tags[programmed]
        ours = tag.kinds(tags) == Kind.JOURNAL
        self.journal_pages, self.journal_tags = programmed[ours], tags[ours]
        self.index = TagIndex(self.store.nand, programmed[~ours], tags[~ours])
        self.records: dict[int, tuple[dict[str, Any], bytes, U32]] = {}  # by number: JSON, rows, pages
        self.sequences: dict[int, tuple[dict[str, Any], bytes]] = {}  # by handle: JSON, rows

    def find_records(self) -> None:
        """Every record that is complete."""
        nand, found = self.store.nand, dict[int, dict[int, int]]()
        counts: dict[int, int] = {}
        fields = (each.tolist() for each in tag.record_fields(self.journal_tags))
        for ppn, number, index, count in zip(self.journal_pages, *fields, strict=True):
            if nand.intact(np.array([ppn], np.uint32))[0]:
                found.setdefault(number, {})[index] = int(ppn)
                counts.setdefault(number, count)
        for number, parts in found.items():
            if len(parts) == counts[number]:
                pages = np.array([parts[index] for index in range(counts[number])], np.uint32)
                self.records[number] = *unpack(nand.content[pages]), pages
        if self.journal_tags.size:
            self.journal.number = int(tag.record_fields(self.journal_tags)[0].max()) + 1

    def replay_records(self) -> None:
        """From the last checkpoint on, until one is missing."""
        number = max((number for number, (head, _, _) in self.records.items() if head["full"]), default=-1)
        pages = [self.journal.pages]
        while number in self.records:
            head, raw, mine = self.records[number]
            self._replay(head, raw)
            pages.append(mine)
            number += 1
        self.journal.pages = np.concatenate(pages)
        # The run of records is broken after a crash: the next one is a checkpoint
        self.journal.since_checkpoint = BROKEN

    def _replay(self, head: dict[str, Any], raw: bytes) -> None:
        if head["full"]:
            self.sequences.clear()
        for handle in head["gone"]:
            self.sequences.pop(handle, None)
        at = 0
        for described in head["sequences"]:
            size = tail_bytes(described, form_of(described, self.store.geometry.page_bytes))
            self.sequences[described["handle"]] = described, raw[at : at + size]
            at += size
        self.kv.next_handle, self.kv.owners.next = head["next_handle"], head["next_owner"]
        self.blocks.resize(head["namespace_pages"])
        for name, count in head["counters"].items():
            setattr(self.store.counters, name, count)

    def restore_sequences(self) -> None:
        """Full groups by their tags, unfinished ones from the recorded rows."""
        for described, raw in self.sequences.values():
            seq = self._sequence(described)
            self.kv.sequences[seq.handle] = seq
            at = 0
            for layer in np.flatnonzero(seq.lengths).tolist():
                self._find_groups(seq, layer)
                at = _buffer_rows(self.kv, seq, layer, raw, at)
                if not seq.failed:
                    _buffer_copies(self.kv, seq, layer)

    def _sequence(self, described: dict[str, Any]) -> Sequence:
        layers, heads, *_ = described["shape"]
        form = form_of(described, self.store.geometry.page_bytes)
        seq = Sequence(described["handle"], form, layers, heads, Writer(self.store.geometry.channels))
        seq.newest = described["newest"]
        seq.lengths[:] = described["lengths"]
        seq.owners = [[(owner, tokens) for owner, tokens in chain] for chain in described["owners"]]
        seq.failed, seq.label = described["failed"], described.get("label", 0)
        for owner, first_write in described["born"].items():
            self.kv.owners.restore(int(owner), first_write, seq.handle)
        return seq

    def _find_groups(self, seq: Sequence, layer: int) -> None:
        length = int(seq.lengths[layer])
        for mapped in seq.maps.values():
            groups = length // mapped.per_group
            mapped.reserve(-(-length // mapped.per_group))
            owners = np.array([seq.owner_of(layer, mapped.per_group, group) for group in range(groups)])
            for owner in np.unique(owners).tolist():
                which = np.flatnonzero(owners == owner)
                found = self.index.find(mapped.tags(owner, layer, which), self.kv.owners.first_write[owner])
                mapped.slots[layer][:, which] = found
                seq.failed |= bool((found == UNMAPPED).any())

    def restore_blocks(self) -> None:
        """Logical pages by their tags, the newest of each."""
        self.blocks.restore(*self.index.newest(Kind.BLOCK))

    def count_valid(self) -> None:
        """Pages that are in use, each once, however many sequences share it."""
        mapped = [m.flash_slots() for seq in self.kv.sequences.values() for m in seq.maps.values()]
        shared = np.unique(np.concatenate([*mapped, np.zeros(0, np.uint32)]))
        for pages in (self.journal.pages, shared):
            np.add.at(self.store.placement.valid, self.store.nand.block_of(pages), 1)

    def change_owners(self) -> None:
        """What was programmed after the last commit has tags of the same owners: go on as others."""
        for seq in self.kv.sequences.values():
            self.kv.change_owner(seq)
        self.kv.changes.dirty.clear()


STEPS: tuple[Callable[[Recovery], None], ...] = (
    Recovery.find_records,
    Recovery.replay_records,
    Recovery.restore_sequences,
    Recovery.restore_blocks,
    Recovery.count_valid,
    Recovery.change_owners,
)


def recover(journal: Journal) -> None:
    """Bring back the last commit on this Nand, if something was ever written to it."""
    if journal.store.nand.writes:
        recovery = Recovery(journal)
        for step in STEPS:
            step(recovery)


def _buffer_rows(kv: KvMap, seq: Sequence, layer: int, raw: bytes, at: int) -> int:
    """Give primary maps the recorded rows of their unfinished groups, from byte `at` on; returns where they end."""
    length = int(seq.lengths[layer])
    for mapped in seq.primary.values():
        shape = length % mapped.per_group, seq.heads, seq.layout.head_dim
        values = shape[0] * shape[1] * shape[2]
        rows: U16 = np.frombuffer(raw, np.uint16, values, at).reshape(shape)
        kv.tails.buffer_tail(mapped, layer, length - shape[0], shape[0], rows)
        at += rows.nbytes
    return at


def _buffer_copies(kv: KvMap, seq: Sequence, layer: int) -> None:
    """Give copies the rows of their unfinished groups, from the primary maps."""
    length = int(seq.lengths[layer])
    for mapped in seq.copies:
        source = seq.primary[mapped.source]
        first = length // mapped.per_group * mapped.per_group
        rows = source.gather(kv.banks, source.slots[layer, :, : -(-length // source.per_group)], length)
        kv.tails.buffer_tail(mapped, layer, first, length - first, rows[first:])


class TagIndex:
    """Programmed pages by tag."""

    def __init__(self, nand: Nand, ppns: U32, tags: U64) -> None:
        order = np.lexsort((nand.write_numbers[ppns], tags))
        self.nand, self.ppns, self.tags = nand, ppns[order], tags[order]

    def find(self, wanted: U64, after: int) -> U32:
        """An intact page with each tag, written after write number `after`; UNMAPPED where there is none."""
        first, last = (np.searchsorted(self.tags, wanted, side) for side in ("left", "right"))
        found: U32 = np.full(wanted.shape, UNMAPPED, np.uint32)
        while (open_ := (found == UNMAPPED) & (first < last)).any():
            last = last - 1
            ppns = self.ppns[last[open_]]
            good = self.nand.intact(ppns) & (self.nand.write_numbers[ppns] > after)
            found[open_] = np.where(good, ppns, UNMAPPED)
        return found

    def newest(self, kind: Kind) -> tuple[U64, U32]:
        """Tags of a kind, each once, and the newest intact page of each."""
        tags = np.unique(self.tags[tag.kinds(self.tags) == kind])
        ppns = self.find(tags, 0)
        return tags[ppns != UNMAPPED], ppns[ppns != UNMAPPED]
