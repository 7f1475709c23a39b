"""Power-on recovery: restores the drive's last commit.

Recovery takes the last complete checkpoint and the records after it. Every sequence is restored exactly as of its last
commit, and no flush is lost: pages programmed later are ignored, and no block is erased that a commit still refers to.
Between two flushes, sequences are independent: one that was freed may stay freed although tokens that another sequence
got earlier are gone.

An unreadable record is distinguished from a torn write: the second copy of a record is begun after the first is
complete, the next record after both are, and each record counts the writes before it. The state of a lost record is
taken from later records; sequences without a later record have failed. No sequence is older than its last commit
without a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from csd_io.compiled import njit
from csd_spec import LAYOUTS
from csd_spec.arrays import F32, U16, U32, U64
from csd_spec.view import UNMAPPED
from ftl.discards import Discards
from ftl.errors import UncorrectableReadError
from ftl.flash import tag
from ftl.flash.files import SPARES
from ftl.flash.memory import reserve_zeros
from ftl.flash.nand import Nand
from ftl.flash.placement import Writer
from ftl.flash.tag import PageKind
from ftl.journal import BROKEN, Journal
from ftl.kv.map import KvMap
from ftl.kv.sequence import KeptSequence, Sequence
from ftl.kv.values import is_value
from ftl.record import Record, RecordType, form_of, sums_of, tail_bytes


class Recovery:
    """State of a power-on: what has been read from the array so far."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.kv, self.store, self.blocks = journal, journal.kv, journal.store, journal.blocks
        programmed = self.store.nand.programmed()
        tags = self.store.nand.tags[programmed]
        ours = tag.kinds(tags) == PageKind.JOURNAL
        self.journal_pages, self.journal_tags = programmed[ours], tags[ours]
        self.index = TagIndex(self.store.nand, programmed[~ours], tags[~ours])
        self.records: dict[int, Record] = {}
        self.pages: dict[int, U32] = {}  # pages of each record, in all readable copies
        self.newest = self.begun_twice = -1  # last record with any page; with a page of its 2nd copy
        self.sequences: dict[int, tuple[dict[str, Any], bytes, F32 | None]] = {}  # by handle: JSON, rows, sums of V
        self.unsure: set[int] = set()  # handles whose state may be in a lost record
        self.writes = 0  # write count of the last record
        self.findings = list[str]()  # messages about lost data

    def find_records(self) -> None:
        """Find every record with a complete copy, or at least its text."""
        places: dict[tuple[int, int], dict[int, int]] = {}
        counts: dict[tuple[int, int], int] = {}
        fields = (column.tolist() for column in tag.record_fields(self.journal_tags))
        self.store.nand.page_in(self.journal_pages)
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
        assert self.begun_twice <= self.newest
        self.journal.number = self.newest + 1

    def _add(self, number: int, record: Record, pages: U32) -> None:
        if record.number == number:
            mine = self.pages.get(number, np.zeros(0, np.uint32))
            self.pages[number] = np.concatenate([mine, pages])
            known = self.records.get(number)
            if known is None or known.rows is None:
                self.records[number] = record

    def replay_records(self) -> None:
        """Replay records from the last checkpoint on, as long as each follows the previous one.

        The sequence ends with the last record that was begun. No earlier record may be missing: records begun later
        prove that it was complete.
        """
        numbers = sorted(self.records)
        whole = [n for n in numbers if self.records[n].type is RecordType.CHECKPOINT]
        first = whole[-1] if whole else numbers[0] if numbers else self.newest
        if not whole and (self.newest > 0 or self.begun_twice >= 0):
            self._mark_record_lost("no checkpoint can be read")
            self._size_blocks_by_tags()
        last: Record | None = None
        for number in range(first, self.newest + 1):
            record = self.records.get(number)
            if record is None or (last and last.number == number - 1 and not record.follows(last)):
                if number > max(self.begun_twice, numbers[-1] if numbers else -1):
                    break  # torn write: this record was in flight at power loss
                if last:
                    self._mark_record_lost(f"record {number} cannot be read")
                if record is None:
                    continue
            self._replay(record)
            last = record
        mine = [self.pages[number] for number in range(first, self.newest + 1) if number in self.pages]
        self.journal.pages = np.concatenate([self.journal.pages, *mine])
        self.journal.chain = last.digest if last else 0
        # Numbers may have a gap after a power loss: the next record is a checkpoint
        self.journal.since_checkpoint = BROKEN

    def _size_blocks_by_tags(self) -> None:
        """Without a checkpoint, size the namespace by the highest logical page ever written."""
        tags = self.index.tags[tag.kinds(self.index.tags) == PageKind.BLOCK]
        self.blocks.resize(int(tag.logical_pages(tags).max()) + 1 if tags.size else 0)
        self.writes = self.store.nand.writes

    def _mark_record_lost(self, what: str) -> None:
        """Record a lost record: the state of all known sequences is uncertain until a later record has it."""
        self.findings.append(f"journal: {what}")
        self.unsure |= set(self.sequences)

    def _replay(self, record: Record) -> None:
        head = record.head()
        assert head["next_handle"] >= self.kv.next_handle, f"record {record.number} is older than the one before"
        if record.type is RecordType.CHECKPOINT:
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
        if "discarded" in head or record.type is RecordType.CHECKPOINT:
            self.blocks.discards = Discards(head.get("discarded", ()))
        self.writes = head.get("writes", 0)
        for name, count in head["counters"].items():
            setattr(self.store.counters, name, count)

    def restore_sequences(self) -> None:
        """Restore full groups by their tags, and unfinished ones from the recorded rows."""
        self.index.check(self.writes)
        if any(SPARES in file for file in self.store.nand.damage.files):
            self._mark_record_lost("records may be missing with the spare areas")
        for described, raw, sums in self.sequences.values():
            if is_value(described.get("label", 0)) and not described.get("names"):
                self.kv.changes.freed.add(described["handle"])  # power was lost before the value was stored completely
                continue
            seq = self._sequence(described, raw)
            seq.v_sums = sums
            self.kv.sequences[seq.handle] = seq
            self.kv.usage.add(seq)
            seq.names = {bytes.fromhex(key): tokens for key, tokens in described.get("names", {}).items()}
            self.kv.names.index(seq, list(seq.names))
            if seq.handle in self.unsure and not seq.failed:
                seq.failed = True
                self.findings.append(f"sequence {seq.handle}: may lack what a lost record said of it")
            if seq.kept:
                continue
            at = 0
            for layer in np.flatnonzero(seq.lengths).tolist():
                self._find_groups(seq, layer)
                at = _buffer_rows(self.kv, seq, layer, raw, at)
                if not seq.failed:
                    seq.check_layer(layer)
                    self._buffer_copies(seq, layer)
            assert at == len(raw), f"sequence {seq.handle}: {len(raw)} bytes of rows are recorded, {at} restored"

    def _buffer_copies(self, seq: Sequence, layer: int) -> None:
        """Rebuild the buffers of copies' unfinished groups from the primary maps."""
        length = int(seq.lengths[layer])
        for mapped in seq.copies:
            first = length // mapped.per_group * mapped.per_group
            if mapped.can_buffer(length // mapped.per_group):
                try:
                    rows = self.kv.rows(seq, mapped.source, layer, range(first, length))
                except UncorrectableReadError:
                    self.findings.append(f"sequence {seq.handle}: pages of layer {layer} cannot be read")
                    return
                self.kv.open_groups.buffer_tail(mapped, layer, first, length - first, rows)

    def _sequence(self, described: dict[str, Any], raw: bytes) -> Sequence:
        (layers, heads, *_), page_bytes = described["shape"], self.store.geometry.page_bytes
        form = form_of(described, page_bytes)
        stand_in = form or LAYOUTS["opaque"].paged(page_bytes, 1, 1)
        seq = Sequence(described["handle"], stand_in, layers, heads, Writer(self.store.geometry.channels))
        seq.newest = described["newest"]
        if form:
            seq.lengths[:] = described["lengths"]
        else:
            seq.kept = KeptSequence(described, raw, self.index.of_owners(described["born"]))
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
        """Map the newest intact page of each logical page; pages that are recorded or found as lost stay lost.

        Discarded pages stay unmapped.
        """
        tags, ppns = self.index.newest(PageKind.BLOCK)
        lpns, there = tag.logical_pages(tags), ppns != UNMAPPED
        numbers = np.where(there, self.store.nand.write_numbers[np.where(there, ppns, 0)], 0)
        known = np.isin(lpns, list(self.blocks.lost))
        undone = self.blocks.discards.undone(lpns)
        newer = (self._lost_writes(tags) > np.maximum(numbers, undone)) & (lpns < self.blocks.pages)
        for lpn in lpns[newer & ~known].tolist():
            self.findings.append(f"block namespace: logical page {lpn} cannot be read")
        known &= numbers <= self.writes  # newer pages have been rewritten
        erased = self.blocks.lost.difference(lpns.tolist())  # even their tags are gone
        self.blocks.lost = erased.union(lpns[newer | known].tolist())
        good = there & ~newer & ~known & (numbers > undone)
        self.blocks.restore(tags[good], ppns[good])

    def _lost_writes(self, tags: U64) -> U64:
        """For each tag, the number of the newest committed write that is unreadable, or 0.

        Torn writes are remembered, since later records count higher write numbers.
        """
        damaged, numbers = self.index.damaged(PageKind.BLOCK)
        lost = (numbers <= self.writes) & ~np.isin(numbers, list(self.blocks.torn))
        self.blocks.torn = set(numbers[~lost].tolist())
        newest: U64 = np.zeros(tags.size, np.uint64)
        np.maximum.at(newest, np.searchsorted(tags, damaged[lost]), numbers[lost])
        return newest

    def report(self) -> None:
        """Count losses in the drive's health counters."""
        damaged = self.store.nand.damage.spares | self.store.nand.damage.blocks
        self.findings += self.store.nand.damage.files
        self.findings += [f"flash: the spare area of page or block {each} cannot be read" for each in sorted(damaged)]
        self.store.counters.unrecovered += len(self.findings)
        self.store.garbage = [] if self.findings else self.store.placement.erasable_blocks()

    def count_valid(self) -> None:
        """Count pages in use, each once, even if several sequences share them."""
        placement, seen = self.store.placement, reserve_zeros((self.store.geometry.pages,), np.uint8)
        placement.count(self.journal.pages, seen)
        for seq in self.kv.sequences.values():
            held = [mapped.flash_slots() for mapped in seq.maps.values()]
            for ppns in [*held, seq.kept.pages] if seq.kept else held:
                self.kv.shared.found(ppns, seen)
                placement.count(ppns, seen)
        assert (placement.valid <= self.store.nand.next_page).all(), "a page in use was not programmed"

    def change_owners(self) -> None:
        """Give every sequence a new owner, since pages programmed after the last commit have tags of the old one."""
        for seq in (seq for seq in self.kv.sequences.values() if not seq.kept):
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
    """Restore the last commit of this Nand, if it was ever written; returns messages about lost data."""
    nand = journal.store.nand
    if not (nand.writes or nand.damage.spares or nand.damage.files):
        return ()
    recovery = Recovery(journal)
    for step in STEPS:
        step(recovery)
    return tuple(recovery.findings)


def _buffer_rows(kv: KvMap, seq: Sequence, layer: int, raw: bytes, at: int) -> int:
    """Fill the buffers of primary maps with the recorded rows, starting at byte `at`; returns where they end."""
    length = int(seq.lengths[layer])
    for mapped in seq.primary.values():
        shape = length % mapped.per_group, seq.heads, seq.layout.head_dim
        values = shape[0] * shape[1] * shape[2]
        rows: U16 = np.frombuffer(raw, np.uint16, values, at).reshape(shape)
        kv.open_groups.buffer_tail(mapped, layer, length - shape[0], shape[0], rows)
        at += rows.nbytes
    return at


@njit(cache=True, nogil=True)
def _tag_ranges(tags, wanted, first, last):  # type: ignore[no-untyped-def]
    """Find where each wanted tag (N,) begins and ends in the ascending `tags`; most are consecutive in both."""
    at = 0
    for i in range(wanted.size):
        if at == tags.size or tags[at] != wanted[i]:
            at = np.searchsorted(tags, wanted[i])
        first[i] = at
        while at < tags.size and tags[at] == wanted[i]:
            at += 1
        last[i] = at


class TagIndex:
    """Programmed pages ordered by tag, then by write number."""

    def __init__(self, nand: Nand, ppns: U32, tags: U64) -> None:
        order, numbers = np.argsort(tags), nand.write_numbers[ppns]
        self.tags = tags[order]
        same = np.concatenate([[False], self.tags[1:] == self.tags[:-1], [False]])
        self._alone = ~(same[1:] | same[:-1])[: self.tags.size]
        others = np.flatnonzero(~self._alone)  # few: the fast sort has one key and is not stable
        which = order[others]
        order[others] = which[np.lexsort((which, numbers[which], tags[which]))]
        self.nand, self.ppns, self._numbers = nand, ppns[order], numbers[order]

    def check(self, writes: int) -> None:
        """Check the pages that may be torn: those with duplicate tags, and those written after write `writes`.

        All others are covered by a record that was written after them; damage in these is found when they are read.
        """
        doubtful = ~self._alone | (self._numbers > writes)
        for some in np.array_split(self.ppns[doubtful], 1 + int(doubtful.sum()) // 4096):
            self.nand.page_store.begin()
            self.nand.page_in(np.sort(some))

    def find(self, wanted: U64, after: int) -> U32:
        """An intact page for each tag, written after write number `after`; UNMAPPED if there is none."""
        first, last = np.empty((2, wanted.size), np.int64)
        _tag_ranges(self.tags, wanted.reshape(-1), first, last)
        found: U32 = np.full(wanted.size, UNMAPPED, np.uint32)
        while (open_ := (found == UNMAPPED) & (first < last)).any():
            last -= 1
            at = last[open_]
            good = (self._numbers[at] > after) & ~self.nand.damage.contains(self.ppns[at])
            found[open_] = np.where(good, self.ppns[at], UNMAPPED)
        return found.reshape(wanted.shape)

    def of_owners(self, born: Mapping[str, int]) -> U32:
        """An intact page for each tag of these owners, written after the write number with which they were born."""
        found, owners = [np.zeros(0, np.uint32)], np.where(tag.is_group(self.tags), tag.owners(self.tags), -1)
        for owner, first_write in born.items():
            found.append(self.find(np.unique(self.tags[owners == int(owner)]), first_write))
        pages = np.concatenate(found)
        intact: U32 = pages[pages != UNMAPPED]
        return intact

    def newest(self, kind: PageKind) -> tuple[U64, U32]:
        """Distinct tags of a kind, and the newest intact page of each; UNMAPPED if there is none."""
        tags = np.unique(self.tags[tag.of_kind(self.tags, kind)])
        return tags, self.find(tags, 0)

    def damaged(self, kind: PageKind) -> tuple[U64, U64]:
        """Tags and write numbers of the damaged pages of a kind."""
        mine = tag.of_kind(self.tags, kind)
        which = ~self.nand.intact(self.ppns[mine])
        return self.tags[mine][which], self._numbers[mine][which]
