"""The translation layer's one door: create, append, fork, crop, free, flush, and the pages behind a selection."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count

import numpy as np
from numpy.typing import NDArray

from csd_spec import DriveSpec, KvLayout, KvView
from csd_spec.model import FP16_BYTES
from csd_spec.view import UNMAPPED, gather_rows
from ftl.append import append
from ftl.block import BlockNamespace
from ftl.cache import PageCache
from ftl.calendar import FlashCalendar
from ftl.collect import collect, level_wear
from ftl.counters import Counters
from ftl.dram import GroupBuffers
from ftl.errors import OutOfSpace, Uncorrectable, UnknownSequence
from ftl.groups import DRAM_BANK, MAX_OWNERS, GroupMap, Kind
from ftl.journal import Journal
from ftl.nand import Nand
from ftl.pages import PagePlan, plan_channels, plan_tokens, stack
from ftl.placement import GROWTH, Placement, Writer
from ftl.relayout import relayout
from ftl.sequence import Sequence

F16 = NDArray[np.float16]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


class Ftl:
    """Sequences of K and V over NAND, drive DRAM and their modelled time.

    Every verb checks first and then acts: when it raises FtlError nothing has changed. What a `flush` has
    acknowledged survives a loss of power at any moment: an Ftl made on the same Nand finds it again.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None = None) -> None:
        self.spec = spec
        self.nand = nand or Nand(spec.geometry)
        self.calendar = FlashCalendar(spec.geometry, spec.channel_timing)
        self.buffers = GroupBuffers(spec.dram_bytes - spec.cache_bytes, spec.geometry.page_bytes)
        self.cache = PageCache(spec.cache_bytes // spec.geometry.page_bytes, spec.geometry.pages)
        self.counters = Counters()
        self.placement = Placement(self.nand)
        self.sequences: dict[int, Sequence] = {}
        self.family: dict[int, set[int]] = {}  # owner -> sequences with pages of it
        self.born: dict[int, int] = {}  # owner -> writes before its first
        self.next_handle, self.next_owner = 1, 0
        self.dirty: set[int] = set()  # sequences changed since they were last recorded
        self.shrunk: set[int] = set()  # those of them that gave pages up
        self.gone: set[int] = set()  # sequences freed since the last commit
        self.mover = Writer(spec.geometry.channels, sparing=True)  # of garbage collection
        self.leveller = Writer(spec.geometry.channels, sparing=True, worn=True)  # of data that does not change
        self.blocks = BlockNamespace(self)
        self.journal = Journal(self)
        self.journal.recover()

    @property
    def banks(self) -> tuple[U16, U16]:
        return self.nand.content.view(np.uint16), self.buffers.content.view(np.uint16)

    @property
    def reserve(self) -> int:
        """Blocks that only collection and the journal may use: an extent for each, and room for a checkpoint."""
        g = self.spec.geometry
        # Of each unfinished group of K and V at most a page is recorded
        rows = sum(2 * seq.heads * int((seq.lengths > 0).sum()) for seq in self.sequences.values())
        checkpoint = -(-rows * 3 // 4 // g.pages_per_block)
        return min(2 * g.channels + checkpoint, g.blocks // 8)

    def sequence(self, handle: int) -> Sequence:
        """The sequence of a handle; raises UnknownSequence, or Uncorrectable for one that lost data."""
        seq = self.sequences.get(handle)
        if seq is None:
            raise UnknownSequence(f"no sequence {handle} on this drive")
        if seq.failed:
            raise Uncorrectable([handle])
        return seq

    def new_owner(self, handle: int) -> int:
        """A number for tags that no sequence uses."""
        owner = next(n % MAX_OWNERS for n in count(self.next_owner) if n % MAX_OWNERS not in self.family)
        self.next_owner = owner + 1
        self.family[owner] = {handle}
        self.born[owner] = self.nand.writes
        return owner

    def create(self, count: int, layers: int, heads: int, layout: KvLayout) -> list[int]:
        """Open sequences; returns their handles. Costs nothing until tokens come."""
        if len(self.family) + count > MAX_OWNERS // 2:  # the rest is for those who crop
            raise OutOfSpace(f"{count} sequences more than {len(self.sequences)}: a drive has {MAX_OWNERS // 2}")
        handles = list(range(self.next_handle, self.next_handle + count))
        self.next_handle += count
        for handle in handles:
            self.sequences[handle] = Sequence(
                handle, layout, layers, heads, self.new_owner(handle), Writer(self.spec.geometry.channels, GROWTH)
            )
        self.dirty.update(handles)
        return handles

    def label(self, handles: Seq[int], label: int) -> None:
        """Keep a number with sequences for whoever named them."""
        for handle in handles:
            self.sequences[handle].label = label

    def append(
        self, handles: Seq[int], layer: int, lengths: I64, k: F16 | None, v: F16 | None, start_ns: int
    ) -> tuple[int, int]:
        """Add rows k, v (sum of lengths, H, d) to a layer: full groups go to flash, the rest waits in DRAM.

        Where drive DRAM has no room for an unfinished embedding group, K alone holds its rows until it is full.
        Returns the number of pages programmed and when the last program ends. Without payload k and v are None.
        """
        return append(self, handles, layer, lengths, k, v, start_ns)

    def check_room(self, count: int) -> None:
        """Raise OutOfSpace unless drive DRAM can hold `count` more buffers."""
        left = self.buffers.left
        if count > left:
            left += sum(int((seq.embedding_k.buffers >= 0).sum()) for seq in self.sequences.values())
        if count > left:
            raise OutOfSpace(f"{count} group buffers wanted, drive DRAM has room for {left}: free sequences first")

    def make_buffers(self, count: int) -> None:
        """Make room for `count` buffers: unfinished embedding groups give way, since K holds their rows too."""
        for seq in self.sequences.values() if count > self.buffers.left else ():
            mapped = seq.embedding_k
            for layer in np.flatnonzero(mapped.buffers[:, 0] >= 0).tolist():
                if count <= self.buffers.left:
                    return
                self.buffers.release(mapped.buffers[layer])
                mapped.slots[layer][mapped.slots[layer] >= DRAM_BANK] = UNMAPPED
                mapped.buffers[layer] = -1

    def buffer_group(self, mapped: GroupMap, layer: int, tokens: int) -> bool:
        """Give the group that `tokens` tokens leave unfinished its buffers, where there is one; whether it has them."""
        group, position = divmod(tokens, mapped.per_group)
        if not mapped.waits:
            return False
        if position and not mapped.buffered(layer):
            if mapped.kind in (Kind.K, Kind.V):
                self.make_buffers(mapped.streams)
            if mapped.streams > self.buffers.left:
                return False
            mapped.buffers[layer] = self.buffers.allocate(mapped.streams)
        if position:
            mapped.slots[layer, :, group] = mapped.buffers[layer].astype(np.uint32) | DRAM_BANK
        elif mapped.buffered(layer):
            self.buffers.release(mapped.buffers[layer])
            mapped.buffers[layer] = -1
        return position > 0

    def allocate(self, jobs: list[tuple[Writer, I64]], reserve: int, start_ns: int) -> list[U32]:
        """Pages for writers; makes room by erasing and collecting when there is none. Raises OutOfSpace."""
        self.placement.check_alive()
        while True:
            try:
                return self.placement.allocate(jobs, reserve)
            except OutOfSpace:
                if not self.make_room(start_ns):
                    raise

    def make_room(self, start_ns: int) -> bool:
        """Erase what is empty; where nothing is, move valid pages together. False when that frees no block."""
        before = self.placement.free_blocks
        if self.placement.empty():
            self.commit(start_ns, everything=False)
        return self.placement.free_blocks > before or collect(self, start_ns)

    def program(
        self, writer: Writer, ppns: U32, data: U8 | None, tags: U64, start_ns: int, write_numbers: U64 | None = None
    ) -> int:
        """Program pages in the order of their numbers; one that fails goes to another block, and ppns (N,) says so.

        Returns when the last program ends. Raises OutOfSpace where no block is left for them: then all are given
        back, and ppns is UNMAPPED.
        """
        finish_ns = start_ns
        left = np.argsort(ppns, kind="stable")
        while left.size:
            page = None if data is None else data[left]
            numbers = None if write_numbers is None else write_numbers[left]
            good = self.nand.program(ppns[left], page, tags[left], numbers)
            finish_ns = max(finish_ns, self.calendar.program(ppns[left[: good + 1]], start_ns))
            left = left[good:]
            if left.size:
                block = int(self.nand.block_of(ppns[left[:1]])[0])
                self.placement.abandon(block)
                moved = left[self.nand.block_of(ppns[left]) == block]
                lanes = ppns[moved].astype(np.int64) % self.spec.geometry.lanes
                try:
                    (others,) = self.allocate([(writer, lanes)], 0, start_ns)
                except OutOfSpace:
                    self.placement.give_back(ppns)
                    ppns[:] = UNMAPPED
                    raise
                self.placement.invalidate(ppns[moved])
                ppns[moved] = others
                left = left[np.argsort(ppns[left], kind="stable")]
        return finish_ns

    def fork(self, handle: int) -> int:
        """A sequence that begins with all that this one holds. Full groups are shared, unfinished ones copied."""
        parent = self.sequence(handle)
        self.check_room(sum(int((mapped.buffers >= 0).sum()) for mapped in (parent.k, parent.v)))
        (child_handle,) = self.create(1, parent.layers, parent.heads, parent.layout)
        child = self.sequences[child_handle]
        for theirs, ours in zip(parent.maps, child.maps, strict=True):
            ours.slots = theirs.slots.copy()
            ours.slots[ours.slots >= DRAM_BANK] = UNMAPPED
            for layer in np.flatnonzero(theirs.buffers[:, 0] >= 0).tolist():
                # Making room for a copy may have cost an original its buffers
                kept = theirs.buffered(layer) and self.buffer_group(ours, layer, int(parent.lengths[layer]))
                if kept and self.nand.payload:
                    self.buffers.content[ours.buffers[layer]] = self.buffers.content[theirs.buffers[layer]]
        child.label = parent.label
        child.lengths[:] = parent.lengths
        for layer in range(parent.layers):
            child.owners[layer] = list(parent.owners[layer])
            child.change_owner(layer, child.newest, int(parent.lengths[layer]))
        for owner in child.all_owners:
            self.family[owner].add(child_handle)
        return child_handle

    def crop(self, handle: int, layer: int, length: int, start_ns: int) -> int:
        """Keep the first `length` tokens of a layer; a group that is cut returns to drive DRAM."""
        seq = self.sequence(handle)
        finish_ns, in_flash = start_ns, False
        if length >= seq.lengths[layer]:
            return finish_ns
        wanted = [m.streams for m in (seq.k, seq.v) if length % m.per_group and not m.buffered(layer)]
        self.check_room(sum(wanted))
        cuts = [mapped.slots[layer, :, length // mapped.per_group].copy() for mapped in seq.maps]
        for mapped, cut in zip(seq.maps, cuts, strict=True):
            if length % mapped.per_group and cut[0] < DRAM_BANK and mapped.waits:
                finish_ns = max(finish_ns, self.read(self.whole(cut), start_ns))
        for mapped, cut in zip(seq.maps, cuts, strict=True):
            group, position = divmod(length, mapped.per_group)
            in_flash |= bool((mapped.slots[layer, :, group:] < DRAM_BANK).any())
            self.drop(seq, mapped, layer, group)
            if cut[0] >= DRAM_BANK and not mapped.buffered(layer):
                continue  # K alone holds it
            if self.buffer_group(mapped, layer, length) and self.nand.payload:
                if cut[0] < DRAM_BANK:
                    self.buffers.content[mapped.buffers[layer]] = self.nand.content[cut]
                mapped.poison(self.banks[1], mapped.buffers[layer], position)
        seq.lengths[layer] = length
        self.shrunk.add(handle)
        if in_flash:
            # Groups from here on will be written again: under another owner, since a tag is written once
            before = seq.all_owners
            if seq.owners[layer][-1][0] == seq.newest:
                seq.newest = self.new_owner(handle)
            seq.change_owner(layer, seq.newest, length)
            self._leave(before - seq.all_owners, handle)
        self.dirty.add(handle)
        return finish_ns

    def free(self, handles: Seq[int], start_ns: int) -> None:
        """Forget sequences; blocks that hold nothing else are erased after the next commit."""
        for handle in handles:
            if handle not in self.sequences:
                raise UnknownSequence(f"no sequence {handle} on this drive")
        for handle in handles:
            seq = self.sequences[handle]
            self.placement.close(seq.writer)
            for mapped in seq.maps:
                for layer in range(seq.layers):
                    self.drop(seq, mapped, layer, 0)
                self.buffers.release(mapped.buffers[mapped.buffers >= 0])
            del self.sequences[handle]
            self._leave(seq.all_owners, handle)
            self.dirty.discard(handle)
            self.gone.add(handle)
        if len(self.placement.empty()) > self.spec.geometry.blocks // 128:
            self.commit(start_ns, everything=False)  # many free blocks: the least worn can be chosen

    def succeed(self, seq: Sequence) -> None:
        """Let a sequence write under another owner from here on."""
        before, seq.newest = seq.all_owners, self.new_owner(seq.handle)
        for layer in range(seq.layers):
            seq.change_owner(layer, seq.newest, int(seq.lengths[layer]))
        self._leave(before - seq.all_owners, seq.handle)

    def _leave(self, owners: set[int], handle: int) -> None:
        for owner in owners:
            self.family[owner].discard(handle)
            if not self.family[owner]:
                del self.family[owner], self.born[owner]

    def drop(self, seq: Sequence, mapped: GroupMap, layer: int, first: int) -> None:
        """Unmap a layer's groups from `first` on. Pages that a relative shares stay valid."""
        slots = mapped.slots[layer, :, first:]
        mine = slots < DRAM_BANK
        relatives = set().union(*(self.family[owner] for owner, _ in seq.owners[layer])) - {seq.handle}
        for handle in relatives:
            for other in self.sequences[handle].maps:
                if other.kind == mapped.kind:
                    theirs = other.slots[layer, :, first : first + slots.shape[1]]
                    mine[:, : theirs.shape[1]] &= slots[:, : theirs.shape[1]] != theirs
        self.placement.invalidate(slots[mine])
        slots[:] = UNMAPPED

    def relayout(self, handle: int, m: int, start_ns: int, bits: int = 16) -> int:
        """Change the form of embedding pages at run time; returns when the new copy of K is written."""
        return relayout(self, handle, m, bits, start_ns)

    def commit(self, start_ns: int, everything: bool) -> int:
        """Make what was done, or at least what gave pages up, survive a loss of power; then erase empty blocks."""
        empty = self.placement.empty()
        finish_ns = self.journal.commit(start_ns, everything)
        for block in empty:
            self.erase(block, finish_ns)
        level_wear(self, finish_ns)
        return finish_ns

    def erase(self, block: int, start_ns: int) -> None:
        """Erase an empty block and take it back."""
        self.nand.erase(block)
        self.cache.forget(self.nand.pages_of(block))
        self.calendar.erase(block % self.spec.geometry.lanes, start_ns)
        self.placement.release(block)

    def flush(self, start_ns: int) -> int:
        """Acknowledge: returns when everything that was done before is in flash."""
        return max(self.commit(start_ns, everything=True), self.calendar.idle_ns())

    def format(self, start_ns: int) -> int:
        """Forget all sequences and blocks, and erase them; wear and counters stay. Returns when it is done."""
        self.free(list(self.sequences), start_ns)
        self.blocks.discard()
        return self.flush(self.commit(start_ns, everything=True))

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
            k_slots=stack([seq.k.slots[layer] for seq in seqs], tokens),
            v_slots=stack([seq.v.slots[layer] for seq in seqs], tokens),
            e_slots=stack([seq.embedding_k.slots[layer] for seq in seqs], groups).reshape(
                len(seqs) * heads, lay.embedding_pages, groups
            ),
        )

    def token_pages(self, view: KvView, slots: U32, tokens: I32, counts: I64) -> PagePlan:
        """Pages of `slots` (k_slots or v_slots) behind tokens (N, k), ascending, of which counts (N,) are used."""
        row_bytes = FP16_BYTES * view.layout.head_dim
        return self._plan(*plan_tokens(slots, tokens, counts, view.layout.n, row_bytes, self._word_bytes))

    def embedding_pages(self, view: KvView, channels: I32) -> PagePlan:
        """Pages behind channels (N, r), ascending: embedding pages, or K's own where there are none yet.

        Those that the cache has are left out.
        """
        slots, lay = (view.e_slots, view.k_slots), view.layout
        shape = lay.m, lay.T, lay.n, FP16_BYTES * lay.head_dim, lay.run_bytes, lay.scale_bytes
        plan = self._plan(*plan_channels(*slots, channels, view.seq_lens, *shape, self._word_bytes))
        missed = self.cache.touch(plan.ppns)
        self.counters.cached += plan.ppns.size - int(missed.sum())
        return plan.only(missed)

    def table_pages(self, nbytes: I64) -> PagePlan:
        """Pages of tables of nbytes (N,), each begins a page, over all lanes; their content is elsewhere."""
        size = self.spec.geometry.page_bytes
        pages = -(-nbytes // size)
        ends = np.cumsum(pages)
        useful = np.full(int(pages.sum()), size)
        useful[ends[pages > 0] - 1] = (nbytes - (pages - 1) * size)[pages > 0]
        ppns = np.arange(useful.size, dtype=np.uint32) % np.uint32(self.spec.geometry.lanes)
        word = self._word_bytes or size
        return PagePlan(ppns, useful, -(-useful // word) * word, ends, stored=False)

    def _plan(self, ppns: U32, useful: I64, words: I64, ends: I64) -> PagePlan:
        return PagePlan(ppns, useful, words * (self._word_bytes or self.spec.geometry.page_bytes), ends)

    def whole(self, ppns: U32) -> PagePlan:
        """A plan for everything in these pages."""
        nbytes = np.full(ppns.size, self.spec.geometry.page_bytes)
        return PagePlan(ppns, nbytes, nbytes, np.array([ppns.size]))

    @property
    def _word_bytes(self) -> int:
        """The least that crosses a channel of a page; 0 is all of it."""
        return self.spec.timing.codeword_bytes or 0

    def read_back(self, handle: int, layer: int) -> tuple[F16, F16, PagePlan]:
        """K and V of a layer, each (S, H, d), and the pages they come from."""
        seq = self.sequence(handle)
        view = self.view([handle], layer)
        length = int(seq.lengths[layer])
        tokens = np.broadcast_to(np.arange(length, dtype=np.int32), (seq.heads, length))
        plans = [self.token_pages(view, slots, tokens, view.seq_lens) for slots in (view.k_slots, view.v_slots)]
        columns = zip(*((p.ppns, p.useful, p.nbytes) for p in plans), strict=True)
        ppns, useful, nbytes = (np.concatenate(column) for column in columns)
        plan = PagePlan(ppns, useful, nbytes, np.array([ppns.size]))
        k, v = (gather_rows(view.banks, slots, length, seq.layout) for slots in (view.k_slots, view.v_slots))
        return k, v, plan

    def read(self, plan: PagePlan, start_ns: int) -> int:
        """Bring a plan's pages to the engine; returns when all are there.

        Raises Uncorrectable, and fails the sequences concerned, where the ECC gives up.
        """
        if plan.stored:
            self.nand.check_readable(plan.ppns)
        self.counters.read += plan.ppns.size
        finish_ns = self.calendar.read(plan.ppns, plan.nbytes, start_ns)
        if self.nand.faults.raw_bit_errors and plan.stored:
            errors = self.nand.bit_errors(plan.ppns)
            again = errors > self.nand.faults.ecc_bits
            if again.any():
                finish_ns = self.calendar.read(plan.ppns[again], plan.nbytes[again], finish_ns)
            lost = plan.ppns[errors > self.nand.faults.retry_bits]
            if lost.size:
                self.counters.unrecovered += lost.size
                raise Uncorrectable(self._fail(lost))
        return finish_ns

    def _fail(self, ppns: U32) -> list[int]:
        """Mark the sequences that hold these pages as failed."""
        tags = self.nand.tags[ppns]
        owners = set((tags >> np.uint64(42) & np.uint64(MAX_OWNERS - 1)).tolist())
        handles = sorted(set().union(*(self.family.get(owner, set()) for owner in owners)))
        for handle in handles:
            self.sequences[handle].failed = True
        return handles
