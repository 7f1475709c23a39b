"""Power-on: the drive is again as its last commit has it.

Recovery takes the last complete checkpoint and the run of commits behind it. Every sequence is then as its last commit
has it, exactly, and no flush is lost: pages programmed later are ignored, and no block is erased that a commit still
counts on. Between two flushes sequences are independent of each other: one that was freed may stay freed though tokens
that another got before that are gone.

What cannot be read is told from what was under way when power failed: the second place of a record is begun when the
first is whole, the next record when both are, and a record counts the writes before it. What a lost record said is
taken from later ones; sequences of which none speaks later have failed. Nothing is older than it was without a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F32, U16, U32, U64
from csd_spec.view import UNMAPPED
from ftl.discards import Discards
from ftl.errors import Uncorrectable
from ftl.flash import tag
from ftl.flash.files import SPARES
from ftl.flash.memory import lazy_zeros
from ftl.flash.nand import Nand
from ftl.flash.placement import Writer
from ftl.flash.tag import Kind
from ftl.journal import BROKEN, Journal
from ftl.kv.map import KvMap
from ftl.kv.sequence import Sequence
from ftl.kv.values import is_value
from ftl.record import Record, Type, form_of, sums_of, tail_bytes


class Recovery:
    """What is known so far of the array that a drive is powered on with."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.kv, self.store, self.blocks = journal, journal.kv, journal.store, journal.blocks
        programmed = self.store.nand.programmed()
        tags = self.store.nand.tags[programmed]
        ours = tag.kinds(tags) == Kind.JOURNAL
        self.journal_pages, self.journal_tags = programmed[ours], tags[ours]
        self.index = TagIndex(self.store.nand, programmed[~ours], tags[~ours])
        self.records: dict[int, Record] = {}
        self.pages: dict[int, U32] = {}  # of records, in all places where they can be read
        self.newest = self.begun_twice = -1  # the last record of which there is a page, and one in its second place
        self.sequences: dict[int, tuple[dict[str, Any], bytes, F32 | None]] = {}  # by handle: JSON, rows, sums of V
        self.unsure: set[int] = set()  # handles of which a lost record may have said something else
        self.writes = 0  # those that the last record counts on
        self.findings = list[str]()  # what was lost

    def find_records(self) -> None:
        """Every record that is whole in one of its places, or of which at least the text is left."""
        places: dict[tuple[int, int], dict[int, int]] = {}
        counts: dict[tuple[int, int], int] = {}
        fields = (each.tolist() for each in tag.record_fields(self.journal_tags))
        self.store.nand.bring(self.journal_pages)
        good = self.store.nand.intact(self.journal_pages)
        for ppn, fine, number, place, index, count in zip(self.journal_pages.tolist(), good, *fields, strict=True):
            self.newest = max(self.newest, number)
            if place:
                self.begun_twice = max(self.begun_twice, number)
            if fine:
                places.setdefault((number, place), {})[index] = ppn
                counts.setdefault((number, place), count)
        for (number, place), parts in sorted(places.items()):
            if len(parts) == (count := counts[number, place]):
                pages = np.array([parts[index] for index in range(count)], np.uint32)
                self._add(number, Record.unpack(self.store.nand.read(pages)), pages)
        self.journal.number = self.newest + 1

    def _add(self, number: int, record: Record, pages: U32) -> None:
        if record.number == number:
            mine = self.pages.get(number, np.zeros(0, np.uint32))
            self.pages[number] = np.concatenate([mine, pages])
            known = self.records.get(number)
            if known is None or known.rows is None:
                self.records[number] = record

    def replay_records(self) -> None:
        """From the last checkpoint on, as long as each follows the one before.

        The run of records ends with the last one that was begun. Before that none may be missing: what was begun later
        says that it was there.
        """
        numbers = sorted(self.records)
        whole = [n for n in numbers if self.records[n].type is Type.CHECKPOINT]
        first = whole[-1] if whole else numbers[0] if numbers else self.newest
        if not whole and (self.newest > 0 or self.begun_twice >= 0):
            self._miss("no checkpoint can be read")
            self._size_blocks_by_tags()
        last: Record | None = None
        for number in range(first, self.newest + 1):
            record = self.records.get(number)
            if record is None or (last and last.number == number - 1 and not record.follows(last)):
                if number > max(self.begun_twice, numbers[-1] if numbers else -1):
                    break  # a record that was under way when power failed
                if last:
                    self._miss(f"record {number} cannot be read")
                if record is None:
                    continue
            self._replay(record)
            last = record
        mine = [self.pages[number] for number in range(first, self.newest + 1) if number in self.pages]
        self.journal.pages = np.concatenate([self.journal.pages, *mine])
        self.journal.chain = last.digest if last else 0
        # The run of records is broken after a crash: the next one is a checkpoint
        self.journal.since_checkpoint = BROKEN

    def _size_blocks_by_tags(self) -> None:
        """Without a checkpoint the block namespace has the logical pages that were ever written."""
        tags = self.index.tags[tag.kinds(self.index.tags) == Kind.BLOCK]
        self.blocks.resize(int(tag.logical_pages(tags).max()) + 1 if tags.size else 0)
        self.writes = self.store.nand.writes

    def _miss(self, what: str) -> None:
        """A record is lost: what it said of a sequence is not known, unless a later one says it."""
        self.findings.append(f"journal: {what}")
        self.unsure |= set(self.sequences)

    def _replay(self, record: Record) -> None:
        head = record.head()
        if record.type is Type.CHECKPOINT:
            self.sequences.clear()
            self.unsure.clear()
        for handle in head["gone"]:
            self.sequences.pop(handle, None)
        sizes = [tail_bytes(each, form_of(each, self.store.geometry.page_bytes)) for each in head["sequences"]]
        at, sums_at = 0, sum(sizes)
        for described, size in zip(head["sequences"], sizes, strict=True):
            handle = described["handle"]
            self.unsure.discard(handle)
            raw = bytes(size) if record.rows is None else record.rows[at : at + size]
            if size and record.rows is None:
                self.findings.append(f"journal: record {record.number}: rows of sequence {handle} cannot be read")
                described["failed"] = True
            sums, sums_size = sums_of(described, (record.rows or b"")[sums_at:])
            self.sequences[handle] = described, raw, sums
            at, sums_at = at + size, sums_at + sums_size
        self.kv.next_handle, self.kv.owners.next = head["next_handle"], head["next_owner"]
        self.blocks.resize(head["namespace_pages"])
        self.blocks.lost, self.blocks.torn = set(head.get("lost_pages", ())), set(head.get("torn_writes", ()))
        if "discarded" in head or record.type is Type.CHECKPOINT:
            self.blocks.discards = Discards(head.get("discarded", ()))
        self.writes = head.get("writes", 0)
        for name, count in head["counters"].items():
            setattr(self.store.counters, name, count)

    def restore_sequences(self) -> None:
        """Full groups by their tags, unfinished ones from the recorded rows."""
        self.index.check(self.writes)
        if any(SPARES in each for each in self.store.nand.damage.files):
            self._miss("records may be missing with the spare areas")
        for described, raw, sums in self.sequences.values():
            if is_value(described.get("label", 0)) and not described.get("names"):
                self.kv.changes.freed.add(described["handle"])  # power failed before its store was complete
                continue
            seq = self._sequence(described)
            seq.v_sums = sums
            self.kv.sequences[seq.handle] = seq
            self.kv.usage.add(seq)
            seq.names = {bytes.fromhex(key): tokens for key, tokens in described.get("names", {}).items()}
            self.kv.names.index(seq, list(seq.names))
            if seq.handle in self.unsure and not seq.failed:
                seq.failed = True
                self.findings.append(f"sequence {seq.handle}: may lack what a lost record said of it")
            at = 0
            for layer in np.flatnonzero(seq.lengths).tolist():
                self._find_groups(seq, layer)
                at = _buffer_rows(self.kv, seq, layer, raw, at)
                if not seq.failed:
                    self._buffer_copies(seq, layer)

    def _buffer_copies(self, seq: Sequence, layer: int) -> None:
        """Give copies the rows of their unfinished groups, from the primary maps."""
        length = int(seq.lengths[layer])
        for mapped in seq.copies:
            first = length // mapped.per_group * mapped.per_group
            if mapped.waits_in(length // mapped.per_group):
                try:
                    rows = self.kv.rows(seq, mapped.source, layer, range(first, length))
                except Uncorrectable:
                    self.findings.append(f"sequence {seq.handle}: pages of layer {layer} cannot be read")
                    return
                self.kv.tails.buffer_tail(mapped, layer, first, length - first, rows)

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
            groups = length // mapped.per_group * mapped.programmed
            mapped.reserve(-(-length // mapped.per_group))
            owners = seq.owners_of(layer, mapped.per_group, groups)
            for owner in np.unique(owners).tolist():
                which = np.flatnonzero(owners == owner)
                found = self.index.find(mapped.tags(owner, layer, which), self.kv.owners.first_write[owner])
                mapped.slots[layer][:, which] = found
                if (found == UNMAPPED).any() and not seq.failed:
                    seq.failed = True
                    self.findings.append(f"sequence {seq.handle}: pages of layer {layer} cannot be read")

    def restore_blocks(self) -> None:
        """Logical pages by their tags, the newest of each; lost where that was recorded and cannot be read, none where
        it was discarded."""
        tags, ppns = self.index.newest(Kind.BLOCK)
        lpns, there = tag.logical_pages(tags), ppns != UNMAPPED
        numbers = np.where(there, self.store.nand.write_numbers[np.where(there, ppns, 0)], 0)
        known = np.isin(lpns, list(self.blocks.lost))
        undone = self.blocks.discards.undone(lpns)
        newer = (self._lost_writes(tags) > np.maximum(numbers, undone)) & (lpns < self.blocks.pages)
        for lpn in lpns[newer & ~known].tolist():
            self.findings.append(f"block namespace: logical page {lpn} cannot be read")
        known &= numbers <= self.writes  # others were written again
        erased = self.blocks.lost.difference(lpns.tolist())  # not even their tags are left
        self.blocks.lost = erased.union(lpns[newer | known].tolist())
        good = there & ~newer & ~known & (numbers > undone)
        self.blocks.restore(tags[good], ppns[good])

    def _lost_writes(self, tags: U64) -> U64:
        """Of each tag the number of the newest write that the last record counts on and that cannot be read, or 0.

        Those that were under way when power failed are remembered: later records count writes with higher numbers.
        """
        damaged, numbers = self.index.damaged(Kind.BLOCK)
        lost = (numbers <= self.writes) & ~np.isin(numbers, list(self.blocks.torn))
        self.blocks.torn = set(numbers[~lost].tolist())
        newest: U64 = np.zeros(tags.size, np.uint64)
        np.maximum.at(newest, np.searchsorted(tags, damaged[lost]), numbers[lost])
        return newest

    def report(self) -> None:
        """Count what was lost, for the drive's health."""
        damaged = self.store.nand.damage.spares | self.store.nand.damage.blocks
        self.findings += self.store.nand.damage.files
        self.findings += [f"flash: the spare area of page or block {each} cannot be read" for each in sorted(damaged)]
        self.store.counters.unrecovered += len(self.findings)
        self.store.garbage = [] if self.findings else self.store.placement.erasable_blocks()

    def count_valid(self) -> None:
        """Pages that are in use, each once, however many sequences share it."""
        placement, seen = self.store.placement, lazy_zeros((self.store.geometry.pages,), np.uint8)
        placement.count(self.journal.pages, seen)
        for seq in self.kv.sequences.values():
            for mapped in seq.maps.values():
                ppns = mapped.flash_slots()
                self.kv.shared.found(ppns, seen)
                placement.count(ppns, seen)

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
    Recovery.report,
)


def recover(journal: Journal) -> tuple[str, ...]:
    """Bring back the last commit on this Nand, if something was ever written to it; returns what was lost of it."""
    nand = journal.store.nand
    if not (nand.writes or nand.damage.spares or nand.damage.files):
        return ()
    recovery = Recovery(journal)
    for step in STEPS:
        step(recovery)
    return tuple(recovery.findings)


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


@njit(cache=True, nogil=True)
def _places(tags, wanted, first, last):  # type: ignore[no-untyped-def]
    """Where each of the wanted tags (N,) begins and ends among ascending ones. Most follow each other in both."""
    at = 0
    for i in range(wanted.size):
        if at == tags.size or tags[at] != wanted[i]:
            at = np.searchsorted(tags, wanted[i])
        first[i] = at
        while at < tags.size and tags[at] == wanted[i]:
            at += 1
        last[i] = at


class TagIndex:
    """Programmed pages by tag, those with the same tag by write number."""

    def __init__(self, nand: Nand, ppns: U32, tags: U64) -> None:
        order, numbers = np.argsort(tags), nand.write_numbers[ppns]
        self.tags = tags[order]
        same = np.concatenate([[False], self.tags[1:] == self.tags[:-1], [False]])
        self._alone = ~(same[1:] | same[:-1])[: self.tags.size]
        others = np.flatnonzero(~self._alone)  # few: the fast sort is by one key, and leaves no order among equals
        which = order[others]
        order[others] = which[np.lexsort((which, numbers[which], tags[which]))]
        self.nand, self.ppns, self._numbers = nand, ppns[order], numbers[order]

    def check(self, writes: int) -> None:
        """Check pages of which it is not certain that they were programmed whole: those whose tag another has, and
        those that were written after so many writes. On all others a record counts, and was written behind them; where
        one is damaged, that is found when it is read."""
        doubtful = ~self._alone | (self._numbers > writes)
        for some in np.array_split(self.ppns[doubtful], 1 + int(doubtful.sum()) // 4096):
            self.nand.held.begin()
            self.nand.bring(np.sort(some))

    def find(self, wanted: U64, after: int) -> U32:
        """An intact page with each tag, written after write number `after`; UNMAPPED where there is none."""
        first, last = np.empty((2, wanted.size), np.int64)
        _places(self.tags, wanted.reshape(-1), first, last)
        found: U32 = np.full(wanted.size, UNMAPPED, np.uint32)
        while (open_ := (found == UNMAPPED) & (first < last)).any():
            last -= 1
            at = last[open_]
            good = (self._numbers[at] > after) & ~self.nand.damage.of(self.ppns[at])
            found[open_] = np.where(good, self.ppns[at], UNMAPPED)
        return found.reshape(wanted.shape)

    def newest(self, kind: Kind) -> tuple[U64, U32]:
        """Tags of a kind, each once, and the newest intact page of each; UNMAPPED where there is none."""
        tags = np.unique(self.tags[tag.of_kind(self.tags, kind)])
        return tags, self.find(tags, 0)

    def damaged(self, kind: Kind) -> tuple[U64, U64]:
        """Tags and write numbers of the damaged pages of a kind."""
        mine = tag.of_kind(self.tags, kind)
        which = ~self.nand.intact(self.ppns[mine])
        return self.tags[mine][which], self._numbers[mine][which]
