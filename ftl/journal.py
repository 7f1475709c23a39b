"""Journal of commits: with the spare areas, it is the state that survives a power loss.

A commit is one record (`ftl.record`) of as many pages as it needs: the sequences that changed since the last commit
(lengths, owners, rows still in DRAM, and the sums of V if they are kept), and the sequences that were freed. Locations
of full groups are not recorded: tags identify them. A flush records every changed sequence; before blocks are erased,
it is enough to record those that invalidated pages. A checkpoint records all sequences and supersedes earlier records.

Every record is written twice, one copy after the other: a checkpoint completely, changes without their rows in the
second copy. So an unreadable record is detected, and its text survives; only rows in DRAM are lost. `ftl.recovery`
replays the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from csd_spec.arrays import U32, U64
from ftl.block import BlockNamespace
from ftl.errors import FtlError, OutOfSpaceError
from ftl.flash import tag
from ftl.flash.placement import Writer
from ftl.flash.references import Reference, Referrer
from ftl.kv.map import KvMap
from ftl.record import Record, RecordType, describe, tail_rows

BROKEN = 1 << 60  # pages since the last checkpoint if the sequence of records has a gap: forces a checkpoint


class Journal(Referrer):
    """Writes commits.

    Attributes:
        pages: Valid pages of the journal.
        number: Number of the next record.
        chain: Digest of the last record.
        since_checkpoint: Pages of records after the last checkpoint.
        log: Called as soon as a record is valid, with the changed sequences that it holds, and the freed ones.
        begins: Called with the same arguments before the record is written.
    """

    def __init__(self, kv: KvMap, blocks: BlockNamespace) -> None:
        self.kv, self.store, self.blocks = kv, kv.store, blocks
        self.writers = tuple(Writer(kv.store.geometry.channels) for _ in range(2))  # one per copy
        self.number = 0
        self.chain = 0
        self.pages: U32 = np.zeros(0, np.uint32)
        self.since_checkpoint = 0
        self.log: Callable[[set[int], set[int]], None] | None = None
        self.begins: Callable[[set[int], set[int]], None] | None = None
        self._checkpoint_pages = 0
        self._slack = min(64, self.store.geometry.pages // 32)  # pages of records that never trigger a checkpoint
        self._recorded_namespace: object = (0, [])
        self._discards_recorded = blocks.discards.ranges
        self._blocks_recorded = 0  # counters.blocks at the last record

    def record(self, start_ns: int, everything: bool) -> int:
        """Record all changes, or only those that invalidated pages; writes a checkpoint when the journal is long.

        Returns:
            Simulated time at which the record is in flash, ns.
        """
        changes = self.kv.changes
        full = self.number == 0 or self.since_checkpoint > 2 * self._checkpoint_pages + self._slack
        changed = changes.dirty if everything else changes.dirty & changes.trimmed
        if (changed | changes.freed) & changes.named:
            changed = changed | changes.named & self.kv.sequences.keys()
        of_blocks = self.blocks.pages, sorted(self.blocks.lost)
        written = everything and self.store.counters.blocks != self._blocks_recorded
        written |= self._new_discards or of_blocks != self._recorded_namespace
        if not (full or changed or changes.freed or written):
            return start_ns
        self.store.begin(start_ns)
        ppns, finish_ns = self._write(full, sorted(self.kv.sequences if full else changed), start_ns)
        if full:
            self.store.placement.invalidate(self.pages)
            self.pages, self.since_checkpoint, self._checkpoint_pages = ppns, 0, ppns.size
        else:
            self.pages = np.concatenate([self.pages, ppns])
            self.since_checkpoint += ppns.size
        self._discards_recorded = self.blocks.discards.ranges
        self._recorded_namespace, self._blocks_recorded = of_blocks, self.store.counters.blocks
        self.store.counters.journal += ppns.size
        self._forget_changes(set(self.kv.sequences) if full else changed)
        return finish_ns

    @property
    def _new_discards(self) -> bool:
        """Whether discards changed since the last record; the list may be long, so not every record has it."""
        return self.blocks.discards.ranges is not self._discards_recorded

    def _write(self, full: bool, handles: list[int], start_ns: int) -> tuple[U32, int]:
        """Program both copies of the next record; returns its pages, and the time at which they are in flash, ns."""
        kind = RecordType.CHECKPOINT if full else RecordType.CHANGES
        head = self._head(handles)
        if full or self._new_discards:
            head["discarded"] = self.blocks.discards.ranges
        record = Record.of(kind, self.number, self.chain, head, b"".join(self._rows(handles)))
        news = self.kv.changes.dirty & set(handles), set(self.kv.changes.freed)
        if self.begins:
            self.begins(*news)
        places = record, record if full else replace(record, rows=None)
        ppns, pages_before = list[U32](), self.since_checkpoint
        self.number += 1
        self.since_checkpoint = BROKEN  # until both copies are complete
        try:
            for place, ppn in enumerate(places):
                self.store.nand.advance_generation()
                self.store.nand.sync()  # a copy is only found if the one before it and its data are durable
                written, start_ns = self._write_place(place, ppn, start_ns)
                ppns.append(written)
                if self.log and not place:
                    self.log(*news)
        except OutOfSpaceError:
            self.store.placement.invalidate(np.concatenate([*ppns, np.zeros(0, np.uint32)]))
            raise
        self.chain, self.since_checkpoint = record.digest, pages_before
        return np.concatenate(ppns), start_ns

    def _write_place(self, place: int, record: Record, start_ns: int) -> tuple[U32, int]:
        assert record.number == self.number - 1, "the number of a record is not the next one"
        data, writer = record.pack(self.store.geometry.page_bytes), self.writers[place]
        count = data.shape[0]
        if count >= tag.MAX_RECORD_PAGES:
            raise FtlError(f"a journal record of {count} pages: at most {tag.MAX_RECORD_PAGES - 1}")
        (ppns,) = self.store.placement.allocate([(writer, np.arange(count) + record.number + place)], 0)
        tags = tag.record_tags(record.number, place, count)
        return ppns, self.store.program(writer, ppns, data, tags, start_ns)

    def _head(self, handles: list[int]) -> dict[str, Any]:
        kv = self.kv
        assert max(handles, default=0) < kv.next_handle and kv.changes.freed.isdisjoint(handles)
        return {
            "writes": self.store.nand.writes,
            "next_handle": kv.next_handle,
            "next_owner": kv.owners.next,
            "gone": sorted(kv.changes.freed),
            "sequences": [describe(kv, kv.sequences[handle]) for handle in handles],
            "namespace_pages": self.blocks.pages,
            "lost_pages": sorted(self.blocks.lost),
            "torn_writes": sorted(self.blocks.torn),
            "counters": asdict(self.store.counters),
        }

    def _rows(self, handles: list[int]) -> list[bytes]:
        sequences = [self.kv.sequences[handle] for handle in handles]
        rows = [tail_rows(self.kv, seq, layer) for seq in sequences for layer in range(seq.layers)]
        return rows + [seq.v_sums.tobytes() for seq in sequences if seq.v_sums is not None]

    def _forget_changes(self, recorded: set[int]) -> None:
        changes = self.kv.changes
        assert changes.trimmed <= recorded | changes.freed, "a record lacks sequences that invalidated pages"
        assert changes.freed.isdisjoint(self.kv.sequences), "a sequence that was freed is there"
        changes.dirty -= recorded
        assert changes.dirty <= self.kv.sequences.keys(), "a sequence that is not there has changed"
        changes.named -= recorded | changes.freed
        changes.trimmed.clear()
        changes.freed.clear()

    def references(self, tags: U64) -> Iterator[Reference]:
        """The journal's valid pages, for tags of records."""
        which = np.flatnonzero(tag.kinds(tags) == tag.PageKind.JOURNAL)
        if which.size:
            yield Reference(self.pages, which, None)
