"""What survives a loss of power: a journal of commits, and the spare areas of everything else.

A commit is one record (`ftl.record`) over as many pages as it needs: sequences that changed since the last one
(lengths, owners, the rows that wait in DRAM, and the sums of V where they are kept), and those that were freed. Where
their full groups lie is not recorded, since tags say it. A flush records every sequence that changed; before blocks are
erased it is enough to record those that invalidated pages. A checkpoint records all sequences; what came before it is
not needed any more.

Every record is in two places, one written behind the other: a checkpoint whole, changes without their rows. So a record
that cannot be read is missed, and what it said is known but for rows that waited in DRAM. `ftl.recovery` reads it all
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from csd_spec.arrays import U32, U64
from ftl.block import BlockNamespace
from ftl.errors import FtlError, OutOfSpace
from ftl.flash import tag
from ftl.flash.placement import Writer
from ftl.flash.references import Reference, Referrer
from ftl.kv.map import KvMap
from ftl.record import Record, Type, describe, tail_rows

BROKEN = 1 << 60  # pages since the last checkpoint, where the run of records has a gap: the next is a checkpoint


class Journal(Referrer):
    """Writes commits. `pages` are the journal's valid pages.

    log: told of each record, as soon as it counts, which sequences it holds that had changed, and which were freed;
    begins: the same before it is written.
    """

    def __init__(self, kv: KvMap, blocks: BlockNamespace) -> None:
        self.kv, self.store, self.blocks = kv, kv.store, blocks
        self.writers = tuple(Writer(kv.store.geometry.channels) for _ in range(2))  # of either place
        self.number = 0  # of the next record
        self.chain = 0  # digest of the last one
        self.pages: U32 = np.zeros(0, np.uint32)
        self.since_checkpoint = 0  # pages
        self.log: Callable[[set[int], set[int]], None] | None = None
        self.begins: Callable[[set[int], set[int]], None] | None = None
        self._checkpoint_pages = 0
        self._slack = min(64, self.store.geometry.pages // 32)  # pages that records may take at any rate
        self._said_of_blocks: object = (0, [])  # as recorded
        self._discards_recorded = blocks.discards.ranges
        self._blocks_recorded = 0  # pages of the block namespace that the last record counts on

    def record(self, start_ns: int, everything: bool) -> int:
        """Record all that changed, or only what invalidated pages; every so often a checkpoint, to keep it short.

        Returns when the record is in flash.
        """
        changes = self.kv.changes
        full = self.number == 0 or self.since_checkpoint > 2 * self._checkpoint_pages + self._slack
        changed = changes.dirty if everything else changes.dirty & changes.trimmed
        if (changed | changes.freed) & changes.named:
            changed = changed | changes.named & self.kv.sequences.keys()
        of_blocks = self.blocks.pages, sorted(self.blocks.lost)
        written = everything and self.store.counters.blocks != self._blocks_recorded
        written |= self._new_discards or of_blocks != self._said_of_blocks
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
        self._said_of_blocks, self._blocks_recorded = of_blocks, self.store.counters.blocks
        self.store.counters.journal += ppns.size
        self._forget_changes(set(self.kv.sequences) if full else changed)
        return finish_ns

    @property
    def _new_discards(self) -> bool:
        """Whether there are others than the records have; there may be many, so not every record has them."""
        return self.blocks.discards.ranges is not self._discards_recorded

    def _write(self, full: bool, handles: list[int], start_ns: int) -> tuple[U32, int]:
        """Program the next record in both places; returns its pages and when they are in flash."""
        kind = Type.CHECKPOINT if full else Type.CHANGES
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
        self.since_checkpoint = BROKEN  # unless both places become whole
        try:
            for place, each in enumerate(places):
                self.store.nand.advance_generation()
                self.store.nand.sync()  # whoever finds a place finds the one before it, and all that is counted on
                written, start_ns = self._write_place(place, each, start_ns)
                ppns.append(written)
                if self.log and not place:
                    self.log(*news)
        except OutOfSpace:
            self.store.placement.invalidate(np.concatenate([*ppns, np.zeros(0, np.uint32)]))
            raise
        self.chain, self.since_checkpoint = record.digest, pages_before
        return np.concatenate(ppns), start_ns

    def _write_place(self, place: int, record: Record, start_ns: int) -> tuple[U32, int]:
        data, writer = record.pack(self.store.geometry.page_bytes), self.writers[place]
        count = data.shape[0]
        if count >= tag.MAX_RECORD_PAGES:
            raise FtlError(f"a journal record of {count} pages: at most {tag.MAX_RECORD_PAGES - 1}")
        (ppns,) = self.store.placement.allocate([(writer, np.arange(count) + record.number + place)], 0)
        tags = tag.record_tags(record.number, place, count)
        return ppns, self.store.program(writer, ppns, data, tags, start_ns)

    def _head(self, handles: list[int]) -> dict[str, Any]:
        kv = self.kv
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
        changes.dirty -= recorded
        changes.named -= recorded | changes.freed
        changes.trimmed.clear()
        changes.freed.clear()

    def references(self, tags: U64) -> Iterator[Reference]:
        """The journal's valid pages, for tags of records."""
        which = np.flatnonzero(tag.kinds(tags) == tag.Kind.JOURNAL)
        if which.size:
            yield Reference(self.pages, which, None)
