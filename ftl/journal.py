"""What survives a loss of power: a journal of commits, and the spare areas of everything else.

A commit is one record of JSON and raw rows over as many pages as it needs: sequences that changed since the last one
(lengths, owners, and the rows that wait in DRAM), and those that were freed. Where their full groups lie is not
recorded, since tags say it. A flush records every sequence that changed; before blocks are erased it is enough to
record those that gave pages up. A checkpoint records all sequences; what came before it is not needed any more.

Recovery takes the last complete checkpoint and the unbroken run of commits behind it. Every sequence is then as its
last commit has it, exactly, and no flush is lost: pages programmed later are ignored, and no block is erased that a
commit still counts on. Between two flushes sequences are independent of each other: one that was freed may stay freed
though tokens that another got before that are gone.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from csd_spec import KvLayout
from csd_spec.view import UNMAPPED, gather_rows
from ftl.append import keep
from ftl.errors import FtlError, OutOfSpace
from ftl.groups import KIND_SHIFT, Kind
from ftl.nand import Nand
from ftl.placement import Writer
from ftl.sequence import Sequence

if TYPE_CHECKING:
    from ftl.kv import Ftl

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_HEAD = struct.Struct("<II")  # bytes of JSON, bytes in all
_NUMBERS = (1 << 29) - 1
_BROKEN = 1 << 60  # pages since the last checkpoint, where the run of records has a gap: the next is a checkpoint


class Journal:
    """Writes and reads commits. `pages` are the journal's valid pages."""

    def __init__(self, ftl: Ftl) -> None:
        self.ftl = ftl
        self.writer = Writer(ftl.spec.geometry.channels)
        self.number = 0  # of the next record
        self.pages: U32 = np.zeros(0, np.uint32)
        self._checkpoint_pages, self._since_checkpoint = 0, 0
        self._namespace_pages = 0  # as recorded

    def commit(self, start_ns: int, everything: bool) -> int:
        """Record all that changed, or only what gave pages up; every so often a checkpoint, to keep the journal short.

        Returns when the record is in flash.
        """
        ftl = self.ftl
        full = self.number == 0 or self._since_checkpoint > 2 * self._checkpoint_pages + 64
        changed = ftl.dirty if everything else ftl.dirty & ftl.shrunk
        if not (full or changed or ftl.gone or ftl.blocks.pages != self._namespace_pages):
            return start_ns
        record = self._encode(full, sorted(ftl.sequences if full else changed))
        size = ftl.spec.geometry.page_bytes
        count = -(-len(record) // size)
        data = np.zeros((count, size), np.uint8)
        data.reshape(-1)[: len(record)] = np.frombuffer(record, np.uint8)
        (ppns,) = ftl.placement.allocate([(self.writer, np.arange(count) + self.number)], 0)
        tags = _tag(self.number, np.arange(count), count)
        self.number += 1
        try:
            finish_ns = ftl.program(self.writer, ppns, data, tags, start_ns)
        except OutOfSpace:
            self._since_checkpoint = _BROKEN
            raise
        if full:
            ftl.placement.invalidate(self.pages)
            self.pages, self._since_checkpoint, self._checkpoint_pages = ppns, 0, count
        else:
            self.pages = np.concatenate([self.pages, ppns])
            self._since_checkpoint += count
        self._namespace_pages = ftl.blocks.pages
        ftl.counters.journal += count
        ftl.dirty -= set(ftl.sequences) if full else changed
        ftl.shrunk.clear()
        ftl.gone.clear()
        return finish_ns

    def _encode(self, full: bool, handles: list[int]) -> bytes:
        ftl = self.ftl
        meta, rows = [], []
        for handle in handles:
            seq = ftl.sequences[handle]
            meta.append(
                {
                    "handle": handle,
                    "shape": [seq.layers, seq.heads, seq.layout.head_dim, seq.layout.m, seq.layout.bits],
                    "lengths": seq.lengths.tolist(),
                    "owners": seq.owners,
                    "newest": seq.newest,
                    "born": {owner: ftl.born[owner] for owner in seq.all_owners},
                    "failed": seq.failed,
                    **({"label": seq.label} if seq.label else {}),
                }
            )
            rows += [_tail_rows(ftl, seq, layer) for layer in range(seq.layers)]
        head = {
            "number": self.number,
            "full": full,
            "next_handle": ftl.next_handle,
            "next_owner": ftl.next_owner,
            "gone": sorted(ftl.gone),
            "sequences": meta,
            "namespace_pages": ftl.blocks.pages,
            "counters": asdict(ftl.counters),
        }
        text = zlib.compress(json.dumps(head).encode(), 1)
        raw = b"".join(rows)
        return _HEAD.pack(len(text), _HEAD.size + len(text) + len(raw)) + text + raw

    def recover(self) -> None:
        """Bring back the last commit on this Nand, if there is one."""
        ftl, nand = self.ftl, self.ftl.nand
        if nand.writes == 0:
            return
        programmed = nand.programmed()
        tags = nand.tags[programmed]
        ours = tags >> np.uint64(KIND_SHIFT) == np.uint64(Kind.JOURNAL)
        records = self._records(programmed[ours], tags[ours])
        start = max((number for number, (head, _, _) in records.items() if head["full"]), default=None)
        if ours.any():
            self.number = int((tags[ours] >> np.uint64(30) & np.uint64(_NUMBERS)).max()) + 1
        state: dict[int, tuple[dict[str, Any], bytes]] = {}
        number = -1 if start is None else start
        while number in records:
            head, raw, pages = records[number]
            self._apply(head, raw, state)
            self.pages = np.concatenate([self.pages, pages])
            ftl.next_handle, ftl.next_owner = head["next_handle"], head["next_owner"]
            ftl.blocks.resize(head["namespace_pages"])
            for name, count in head["counters"].items():
                setattr(ftl.counters, name, count)
            number += 1
        np.add.at(ftl.placement.valid, nand.block_of(self.pages), 1)
        # The run of records is broken after a crash: the next commit is a checkpoint
        self._since_checkpoint = _BROKEN
        index = TagIndex(nand, programmed[~ours], tags[~ours])
        for meta, raw in state.values():
            self._restore(meta, raw, index)
        ftl.blocks.restore(index.newest(Kind.BLOCK))
        mapped = [m.flash_slots() for seq in ftl.sequences.values() for m in seq.maps]
        shared = np.unique(np.concatenate([*mapped, np.zeros(0, np.uint32)]))
        np.add.at(ftl.placement.valid, nand.block_of(shared), 1)
        # What was programmed after the last commit has tags of the same owners: go on as others
        for seq in ftl.sequences.values():
            ftl.succeed(seq)
        ftl.dirty.clear()

    def _records(self, ppns: U32, tags: U64) -> dict[int, tuple[dict[str, Any], bytes, U32]]:
        """Every record that is whole: its JSON, its rows, its pages."""
        found: dict[int, dict[int, int]] = {}
        for ppn, tag in zip(ppns.tolist(), tags.tolist(), strict=True):
            if self.ftl.nand.intact(np.array([ppn], np.uint32))[0]:
                found.setdefault(tag >> 30 & _NUMBERS, {})[tag >> 15 & 0x7FFF] = ppn
                found[tag >> 30 & _NUMBERS].setdefault(-1, tag & 0x7FFF)
        whole = {}
        for number, parts in found.items():
            count = parts.pop(-1)
            if len(parts) == count:
                pages = np.array([parts[i] for i in range(count)], np.uint32)
                record = self.ftl.nand.content[pages].tobytes()
                text, size = _HEAD.unpack_from(record)
                head = json.loads(zlib.decompress(record[_HEAD.size : _HEAD.size + text]))
                whole[number] = head, record[_HEAD.size + text : size], pages
        return whole

    def _apply(self, head: dict[str, Any], raw: bytes, state: dict[int, tuple[dict[str, Any], bytes]]) -> None:
        """Carry one commit over into the state: handle -> its JSON and its rows."""
        if head["full"]:
            state.clear()
        for handle in head["gone"]:
            state.pop(handle, None)
        at = 0
        for meta in head["sequences"]:
            layout, heads = self._layout(meta), meta["shape"][1]
            size = sum(4 * heads * layout.head_dim * (length % layout.n) for length in meta["lengths"])
            state[meta["handle"]] = meta, raw[at : at + size]
            at += size

    def _layout(self, meta: dict[str, Any]) -> KvLayout:
        _, _, head_dim, m, bits = meta["shape"]
        return KvLayout(page_bytes=self.ftl.spec.geometry.page_bytes, head_dim=head_dim, m=m, bits=bits)

    def _restore(self, meta: dict[str, Any], raw: bytes, index: TagIndex) -> None:
        """A sequence as the last commit has it: full groups by their tags, unfinished ones from its rows."""
        ftl, (layers, heads, head_dim, _, _) = self.ftl, meta["shape"]
        seq = Sequence(
            meta["handle"], self._layout(meta), layers, heads, meta["newest"], Writer(ftl.spec.geometry.channels)
        )
        seq.lengths[:] = meta["lengths"]
        seq.owners = [[(owner, tokens) for owner, tokens in chain] for chain in meta["owners"]]
        seq.failed, seq.label = meta["failed"], meta.get("label", 0)
        for owner, born in meta["born"].items():
            ftl.family.setdefault(int(owner), set()).add(seq.handle)
            ftl.born[int(owner)] = born
        at = 0
        for layer in np.flatnonzero(seq.lengths).tolist():
            length = int(seq.lengths[layer])
            rows = (length % seq.layout.n, heads, head_dim)
            size = 2 * rows[0] * heads * head_dim
            tails = [np.frombuffer(raw, np.uint16, size // 2, at + part * size).reshape(rows) for part in (0, 1)]
            at += 2 * size
            for mapped in seq.maps:
                groups = length // mapped.per_group
                mapped.reserve(-(-length // mapped.per_group))
                owners = np.array([seq.owner_of(layer, mapped.per_group, group) for group in range(groups)])
                for owner in np.unique(owners).tolist():
                    which = np.flatnonzero(owners == owner)
                    found = index.find(mapped.tags(owner, layer, which), ftl.born[owner])
                    mapped.slots[layer][:, which] = found
                    seq.failed |= bool((found == UNMAPPED).any())
            for mapped, tail in zip((seq.k, seq.v), tails, strict=True):
                keep(ftl, mapped, layer, length - tail.shape[0], tail.shape[0], tail)
            if not seq.failed:
                first = length // seq.layout.T * seq.layout.T
                slots = seq.k.slots[layer, :, : -(-length // seq.layout.n)]
                k = gather_rows(ftl.banks, slots, length, seq.layout).view(np.uint16)
                keep(ftl, seq.embedding_k, layer, first, length - first, k[first:])
        ftl.sequences[seq.handle] = seq


class TagIndex:
    """Programmed pages by tag."""

    def __init__(self, nand: Nand, ppns: U32, tags: U64) -> None:
        order = np.lexsort((nand.write_numbers[ppns], tags))
        self.nand, self.ppns, self.tags = nand, ppns[order], tags[order]

    def find(self, wanted: U64, born: int) -> U32:
        """An intact page with each tag, written after `born`; UNMAPPED where there is none."""
        first, last = (np.searchsorted(self.tags, wanted, side) for side in ("left", "right"))
        found: U32 = np.full(wanted.shape, UNMAPPED, np.uint32)
        while (open_ := (found == UNMAPPED) & (first < last)).any():
            last = last - 1
            ppns = self.ppns[last[open_]]
            good = self.nand.intact(ppns) & (self.nand.write_numbers[ppns] > born)
            found[open_] = np.where(good, ppns, UNMAPPED)
        return found

    def newest(self, kind: Kind) -> tuple[U64, U32]:
        """Tags of a kind, each once, and the newest intact page of each."""
        tags = np.unique(self.tags[self.tags >> np.uint64(KIND_SHIFT) == np.uint64(kind)])
        ppns = self.find(tags, 0)
        return tags[ppns != UNMAPPED], ppns[ppns != UNMAPPED]


def _tail_rows(ftl: Ftl, seq: Sequence, layer: int) -> bytes:
    """Rows of K, then of V, that wait in DRAM for their group to fill; (t, H, d) each."""
    count, dim = int(seq.lengths[layer]) % seq.layout.n, seq.layout.head_dim
    if not ftl.nand.payload:
        return bytes(4 * count * seq.heads * dim)
    content = ftl.buffers.content.view(np.uint16)
    parts = [content[m.buffers[layer], : count * dim].reshape(seq.heads, count, dim) for m in (seq.k, seq.v)]
    return b"".join(part.transpose(1, 0, 2).tobytes() for part in parts) if count else b""


def _tag(number: int, index: NDArray[np.int64], count: int) -> U64:
    """Tags of a record's pages: kind 5, record 29, page 15, pages 15 bits."""
    if count >= 1 << 15:
        raise FtlError(f"a journal record of {count} pages: at most {(1 << 15) - 1}")
    head = np.uint64(int(Kind.JOURNAL) << KIND_SHIFT | (number & _NUMBERS) << 30 | count)
    tags: U64 = head | index.astype(np.uint64) << np.uint64(15)
    return tags
