"""The translation layer's one door: create, append, crop, free, and the pages behind a selection."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

import numpy as np
from numba import njit
from numpy.typing import NDArray

from csd_spec import DriveSpec, KvLayout
from ftl.calendar import FlashCalendar
from ftl.dram import GroupBuffers
from ftl.errors import OutOfSpace, UnknownSequence
from ftl.groups import BANK_SHIFT, DRAM_BANK, EmbeddingMap, GroupMap, Kind, TokenMap
from ftl.nand import ERASED, Nand
from ftl.placement import Placement

F16 = NDArray[np.float16]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]


class Sequence:
    """One sequence's share on this drive: lengths per layer and its three maps."""

    def __init__(self, handle: int, layout: KvLayout, layers: int, heads: int) -> None:
        self.handle, self.layout, self.layers, self.heads = handle, layout, layers, heads
        self.lengths: I64 = np.zeros(layers, np.int64)
        self.k = TokenMap(Kind.K, layout, layers, heads)
        self.v = TokenMap(Kind.V, layout, layers, heads)
        self.embedding_k = EmbeddingMap(Kind.EMBEDDING_K, layout, layers, heads)

    @property
    def maps(self) -> tuple[GroupMap, ...]:
        return self.k, self.v, self.embedding_k


@dataclass(frozen=True, slots=True)
class KvView:
    """Where one layer of B sequences lies. A stream is one KV head of one sequence; N = B * H, sequence first.

    Slots are read through `banks`: bank slot >> 31 (flash, drive DRAM), page slot & 0x7FFFFFFF. A page is a row of
    FP16 bit patterns.
    """

    layout: KvLayout
    banks: tuple[U16, U16]
    seq_lens: I64  # (N,)
    k_slots: U32  # (N, token groups)
    v_slots: U32  # (N, token groups)
    e_slots: U32  # (N, embedding pages, embedding groups)


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Distinct flash pages behind a selection, and how many selected rows or channel runs lie in each."""

    ppns: U32  # (P,)
    hits: I64  # (P,)


@njit(cache=True, nogil=True)
def _plan_tokens(slots, selected, counts, per_group):  # type: ignore[no-untyped-def]
    """Pages of each stream's ascending selected tokens that are in flash."""
    ppns = np.empty(counts.sum(), np.uint32)
    hits = np.zeros(ppns.size, np.int64)
    found = 0
    for stream in range(slots.shape[0]):
        last = -1
        for i in range(counts[stream]):
            group = selected[stream, i] // per_group
            slot = slots[stream, group]
            if slot >> BANK_SHIFT:
                continue
            if group != last:
                ppns[found] = slot
                found += 1
                last = group
            hits[found - 1] += 1
    return ppns[:found], hits[:found]


@njit(cache=True, nogil=True)
def _plan_channels(slots, channels, seq_lens, m, per_group):  # type: ignore[no-untyped-def]
    """Embedding pages of each stream's ascending selected channels that are in flash."""
    streams, _, groups = slots.shape
    ppns = np.empty(streams * channels.shape[1] * groups, np.uint32)
    hits = np.zeros(ppns.size, np.int64)
    found = 0
    for stream in range(streams):
        used = (seq_lens[stream] + per_group - 1) // per_group
        for group in range(used):
            last = -1
            for channel in channels[stream]:
                slot = slots[stream, channel // m, group]
                if slot >> BANK_SHIFT:
                    continue
                if channel // m != last:
                    ppns[found] = slot
                    found += 1
                    last = channel // m
                hits[found - 1] += 1
    return ppns[:found], hits[:found]


class Ftl:
    """Sequences of K and V over NAND, drive DRAM and their modelled time.

    Every verb checks first and then acts: when it raises FtlError nothing has changed.
    """

    def __init__(self, spec: DriveSpec) -> None:
        self.spec = spec
        self.nand = Nand(spec.geometry)
        self.calendar = FlashCalendar(spec.geometry, spec.timing)
        self.placement = Placement(spec.geometry)
        self.buffers = GroupBuffers(spec.dram_bytes, spec.geometry.page_bytes)
        self._sequences: dict[int, Sequence] = {}
        self._handles = count(1)

    @property
    def banks(self) -> tuple[U16, U16]:
        return self.nand.content.view(np.uint16), self.buffers.content.view(np.uint16)

    def sequence(self, handle: int) -> Sequence:
        """The sequence of a handle."""
        try:
            return self._sequences[handle]
        except KeyError:
            raise UnknownSequence(f"no sequence {handle} on this drive") from None

    def create(self, count: int, layers: int, heads: int, layout: KvLayout) -> list[int]:
        """Open sequences; returns their handles. Costs nothing until tokens come."""
        handles = [next(self._handles) for _ in range(count)]
        self._sequences |= {handle: Sequence(handle, layout, layers, heads) for handle in handles}
        return handles

    def append(self, handles: Seq[int], layer: int, lengths: I64, k: F16, v: F16, start_ns: int) -> tuple[int, int]:
        """Add rows k, v (sum of lengths, H, d) to a layer: full groups go to flash, the rest waits in DRAM.

        Returns the number of pages programmed and when the last program ends.
        """
        seqs = [self.sequence(handle) for handle in handles]
        fresh = [seq for seq in seqs if seq.k.buffers[layer, 0] < 0]
        wanted = sum(mapped.streams for seq in fresh for mapped in seq.maps)
        if wanted > self.buffers.left:
            raise OutOfSpace(f"{wanted} group buffers wanted, drive DRAM has room for {self.buffers.left}")
        lanes = [
            self.placement.lanes_for(mapped.stream_numbers(seq.handle, layer), _new_groups(seq, mapped, layer, length))
            for seq, length in zip(seqs, lengths, strict=True)
            for mapped in seq.maps
        ]
        ppns = self.placement.allocate(np.concatenate([part.ravel() for part in lanes]))
        for seq in fresh:
            for mapped in seq.maps:
                mapped.buffers[layer] = self.buffers.allocate(mapped.streams)
        parts = iter(np.split(ppns, np.cumsum([part.size for part in lanes])[:-1]))
        ends = np.cumsum(lengths)[:-1]
        for seq, new_k, new_v in zip(
            seqs, np.split(k.view(np.uint16), ends), np.split(v.view(np.uint16), ends), strict=True
        ):
            for mapped, rows in zip(seq.maps, (new_k, new_v, new_k), strict=True):
                self._append(seq, mapped, layer, rows, next(parts).reshape(mapped.streams, -1))
            seq.lengths[layer] += new_k.shape[0]
        return ppns.size, self.calendar.program(ppns, start_ns)

    def _append(self, seq: Sequence, mapped: GroupMap, layer: int, rows: U16, ppns: U32) -> None:
        """Place rows of one map: complete the group in its buffer, program whole groups, buffer the rest."""
        per, content, buffers = mapped.per_group, self.banks[1], mapped.buffers[layer]
        length = int(seq.lengths[layer])
        first, position = divmod(length, per)
        full = ppns.shape[1]
        mapped.reserve(-(-(length + rows.shape[0]) // per))
        head = min(rows.shape[0], per - position) if position else 0
        if head:
            mapped.fill(content, buffers, position, rows[:head])
        whole = rows[head : (first + full) * per - length] if full else rows[:0]
        if full:
            data = np.full((mapped.streams, full, content.shape[1]), 0xFFFF, np.uint16)
            if position:
                data[:, 0] = content[buffers]
            packed = mapped.pack(whole)
            data[:, full - packed.shape[1] :, : packed.shape[2]] = packed
            tags = mapped.tags(seq.handle, layer, np.arange(first, first + full))
            # Group by group over all streams: each lane's pages are then in program order
            order = np.argsort(ppns, axis=None)
            flat = data.reshape(-1, content.shape[1]).view(np.uint8)
            self.nand.program(ppns.ravel()[order], flat[order], tags.ravel()[order])
            mapped.slots[layer, :, first : first + full] = ppns
            self.buffers.content[buffers] = ERASED
        rest = rows[head + whole.shape[0] :]
        if rest.shape[0]:
            mapped.fill(content, buffers, 0, rest)
        if (length + rows.shape[0]) % per:
            mapped.slots[layer, :, (length + rows.shape[0]) // per] = buffers.astype(np.uint32) | DRAM_BANK

    def crop(self, handle: int, layer: int, length: int, start_ns: int) -> int:
        """Keep the first `length` tokens of a layer; a group that is cut returns to its buffer."""
        seq = self.sequence(handle)
        finish_ns = start_ns
        for mapped in seq.maps if length < seq.lengths[layer] else ():
            group, position = divmod(length, mapped.per_group)
            cut, gone = mapped.slots[layer, :, group].copy(), mapped.flash_slots(layer, group)
            buffers = mapped.buffers[layer]
            if position:
                if cut[0] < DRAM_BANK:
                    finish_ns = max(finish_ns, self.read(PagePlan(cut, np.ones(cut.size, np.int64)), start_ns))
                    self.buffers.content[buffers] = self.nand.content[cut]
                mapped.slots[layer, :, group] = buffers.astype(np.uint32) | DRAM_BANK
            mapped.poison(self.banks[1], buffers, position)
            mapped.slots[layer, :, group + (position > 0) :] = 0xFFFFFFFF
            self.placement.invalidate(gone)
        seq.lengths[layer] = min(length, seq.lengths[layer])
        self._reclaim(start_ns)
        return finish_ns

    def free(self, handles: Seq[int], start_ns: int) -> None:
        """Forget sequences; superblocks that hold nothing else are erased in the background."""
        for seq in [self.sequence(handle) for handle in handles]:
            for mapped in seq.maps:
                self.placement.invalidate(mapped.flash_slots())
                self.buffers.release(mapped.buffers[mapped.buffers >= 0])
            del self._sequences[seq.handle]
        self._reclaim(start_ns)

    def _reclaim(self, start_ns: int) -> None:
        for superblock in self.placement.take_empty():
            self.nand.erase(superblock)
            self.calendar.erase(start_ns)
            self.placement.release(superblock)

    def view(self, handles: Seq[int], layer: int) -> KvView:
        """Slots of one layer of sequences that share a layout; no copy for a single sequence."""
        seqs = [self.sequence(handle) for handle in handles]
        lay = seqs[0].layout
        lengths = np.array([seq.lengths[layer] for seq in seqs])
        heads = seqs[0].heads
        tokens, groups = -(-int(lengths.max()) // lay.n), -(-int(lengths.max()) // lay.T)
        return KvView(
            layout=lay,
            banks=self.banks,
            seq_lens=np.repeat(lengths, heads),
            k_slots=_stack([seq.k.slots[layer] for seq in seqs], tokens),
            v_slots=_stack([seq.v.slots[layer] for seq in seqs], tokens),
            e_slots=_stack([seq.embedding_k.slots[layer] for seq in seqs], groups).reshape(
                len(seqs) * heads, lay.embedding_pages, groups
            ),
        )

    def token_pages(self, view: KvView, slots: U32, tokens: I32, counts: I64) -> PagePlan:
        """Pages of `slots` (k_slots or v_slots) behind tokens (N, k), ascending, of which counts (N,) are used."""
        return PagePlan(*_plan_tokens(slots, tokens, counts, view.layout.n))

    def embedding_pages(self, view: KvView, channels: I32) -> PagePlan:
        """Embedding pages behind channels (N, r), ascending."""
        return PagePlan(*_plan_channels(view.e_slots, channels, view.seq_lens, view.layout.m, view.layout.T))

    def read_back(self, handle: int, layer: int) -> tuple[F16, F16, PagePlan]:
        """K and V of a layer, each (S, H, d), and the pages they come from."""
        seq = self.sequence(handle)
        view = self.view([handle], layer)
        length = int(seq.lengths[layer])
        tokens = np.broadcast_to(np.arange(length, dtype=np.int32), (seq.heads, length))
        plans = [self.token_pages(view, slots, tokens, view.seq_lens) for slots in (view.k_slots, view.v_slots)]
        plan = PagePlan(*(np.concatenate(parts) for parts in zip(*((p.ppns, p.hits) for p in plans), strict=True)))
        k, v = (_gather(view.banks, slots, length, view.layout) for slots in (view.k_slots, view.v_slots))
        return k, v, plan

    def read(self, plan: PagePlan, start_ns: int, nbytes: I64 | None = None) -> int:
        """Bring a plan's pages to the engine, whole or the first nbytes (P,) of each; returns when all are there."""
        self.nand.check_readable(plan.ppns)
        if nbytes is None:
            nbytes = np.full(plan.ppns.size, self.spec.geometry.page_bytes, np.int64)
        return self.calendar.read(plan.ppns, nbytes, start_ns)


def _new_groups(seq: Sequence, mapped: GroupMap, layer: int, length: int) -> I64:
    """Groups that become full when `length` tokens are added, (1, groups)."""
    now = int(seq.lengths[layer])
    return np.arange(now // mapped.per_group, (now + length) // mapped.per_group)[None, :]


def _gather(banks: tuple[U16, U16], slots: U32, length: int, layout: KvLayout) -> F16:
    """Rows (length, H, d) behind token slots (H, groups)."""
    values = layout.n * layout.head_dim
    pages = np.empty((*slots.shape, values), np.uint16)
    buffered = slots >= DRAM_BANK
    pages[~buffered] = banks[0][slots[~buffered], :values]
    pages[buffered] = banks[1][slots[buffered] - DRAM_BANK, :values]
    rows = pages.reshape(slots.shape[0], -1, layout.head_dim)[:, :length]
    return np.ascontiguousarray(rows.transpose(1, 0, 2)).view(np.float16)


def _stack(tables: list[U32], groups: int) -> U32:
    """Tables (streams, capacity) of several sequences as one (sum of streams, groups)."""
    if len(tables) == 1:
        return np.ascontiguousarray(tables[0][:, :groups])
    out = np.full((sum(table.shape[0] for table in tables), groups), 0xFFFFFFFF, np.uint32)
    row = 0
    for table in tables:
        width = min(groups, table.shape[1])
        out[row : row + table.shape[0], :width] = table[:, :width]
        row += table.shape[0]
    return out
