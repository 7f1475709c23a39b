"""Facade of the translation layer: `Ftl` wires the flash store, KV map, block namespace and journal together."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from csd_spec import DriveSpec, KvLayout, KvSlotView, PageFormat
from csd_spec.arrays import F16, I32, I64, U32, Bools
from ftl.block import BlockNamespace
from ftl.flash.collect import GarbageCollector
from ftl.flash.nand import Nand
from ftl.flash.pipeline import CriticalStage, ReadStage, StageTracer, UnitStage, pipeline
from ftl.flash.plan import PagePlan
from ftl.flash.store import FlashStore
from ftl.journal import Journal
from ftl.kv import fork_crop, values
from ftl.kv.append import append
from ftl.kv.map import KvMap
from ftl.kv.reader import Reader
from ftl.kv.relayout import relayout
from ftl.kv.sequence import Sequence
from ftl.recovery import recover

UNRECORDED = 1 << 14  # freed sequences that are recorded without a flush


class Ftl:
    """KV sequences over NAND and drive DRAM, with their simulated time.

    Every command checks its arguments before it acts: after an FtlError nothing has changed. Data that a `flush` has
    acknowledged survives a power loss at any moment: a new Ftl on the same Nand restores it.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None = None) -> None:
        self.spec = spec
        self.store = FlashStore(spec, nand)
        self.kv = KvMap(self.store, spec.dram_bytes - spec.cache_bytes)
        self.blocks = BlockNamespace(self.store)
        self.journal = Journal(self.kv, self.blocks)
        self.collector = GarbageCollector(self.store, self.journal)
        self.reader = Reader(self.kv)
        self.store.referrers += [self.kv, self.blocks, self.journal]
        self.store.reclaim = self.collector
        self.nand, self.timing, self.placement = self.store.nand, self.store.timing, self.store.placement
        self.counters, self.buffers, self.sequences = self.store.counters, self.kv.buffers, self.kv.sequences
        self.findings = recover(self.journal)  # losses found at power-on

    def close(self) -> None:
        """Release files, memory and address space (2 TB of it) immediately.

        The objects refer to each other in cycles, so they would otherwise live until Python's garbage collector runs.
        """
        self.nand.page_store.close()
        self.kv.invalidate_plans()
        self.store.reclaim = None
        self.store.referrers.clear()

    def sequence(self, handle: int) -> Sequence:
        """Return the sequence of a handle; raises UnknownSequenceError, or UncorrectableReadError if it lost data."""
        return self.kv.sequence(handle)

    def create(self, count: int, layers: int, heads: int, layout: PageFormat) -> list[int]:
        """Create empty sequences, which use no pages yet; returns their handles. Raises OutOfSpaceError."""
        return self.kv.create(count, layers, heads, layout)

    def label(self, handles: Seq[int], label: int) -> None:
        """Attach a caller-defined number (the tenant) to sequences; it is journaled with them."""
        for seq in map(self.kv.sequences.__getitem__, handles):
            self.kv.usage.remove(seq)
            seq.label = label
            self.kv.usage.add(seq)

    def append(
        self, handles: Seq[int], layer: int, lengths: I64, k: F16 | None, v: F16 | None, start_ns: int
    ) -> tuple[int, int]:
        """Append rows k, v (sum of lengths, H, d) to a layer; see `ftl.kv.append`."""
        return append(self.kv, handles, layer, lengths, k, v, start_ns)

    def fork(self, handle: int) -> int:
        """Create a copy of a sequence: full groups are shared, unfinished groups are copied. Returns its handle."""
        return fork_crop.fork(self.kv, handle)

    def name(self, handle: int, keys: Seq[bytes], tokens: Seq[int]) -> None:
        """Bind keys to prefixes of a sequence, under the sequence's label; journaled with its tokens."""
        seq = self.kv.sequence(handle)
        changed = self.kv.names.bind(seq, keys, tokens) | {handle}
        self.kv.changes.dirty |= changed
        self.kv.changes.named |= changed

    def store_value(
        self, label: int, key: bytes, value: bytes | bytearray | memoryview, start_ns: int
    ) -> tuple[int, int]:
        """Store a value under a key; see `ftl.kv.values`.

        An existing value loses the key, and the caller has to free it.

        Returns:
            Handle of the value, and the simulated time at which it is in flash, ns.

        Raises:
            FtlError: Nothing has changed.
        """
        handle, finish_ns = values.store(self.kv, label, value, start_ns)
        self.name(handle, [key], [len(value)])
        return handle, finish_ns

    def read_value(self, handle: int, size_bytes: int, start_ns: int) -> tuple[bytes, int]:
        """Return the first `size_bytes` of a value, and the end of the read, ns. Raises UncorrectableReadError."""
        rows = values.rows_of(size_bytes, self.spec.geometry.page_bytes)
        k, v, plan = self.read_back(handle, 0, range(rows))
        return values.join_rows(k, v, size_bytes), self.read(plan, start_ns)

    def unname(self, label: int, keys: Seq[bytes]) -> None:
        """Unbind keys."""
        changed = self.kv.names.unbind(label, keys)
        self.kv.changes.dirty |= changed
        self.kv.changes.named |= changed

    def crop(self, handle: int, layer: int, length: int, start_ns: int) -> int:
        """Truncate a layer to `length` tokens; returns when a group that was cut is back in drive DRAM, ns."""
        return fork_crop.crop(self.kv, handle, layer, length, start_ns)

    def free(self, handles: Seq[int], start_ns: int) -> None:
        """Free sequences; if one is unknown, raises UnknownSequenceError and frees none."""
        fork_crop.free(self.kv, handles)
        # A larger pool of free blocks improves wear leveling, and memory is bounded without a flush
        many = len(self.placement.erasable_blocks()) > self.spec.geometry.blocks // 128
        if many or len(self.kv.changes.freed) > UNRECORDED:
            self.collector.reclaim(start_ns, everything=False)

    def relayout(self, handle: int, m: int, start_ns: int, layout: KvLayout | None = None) -> int:
        """Rewrite the embedding-indexed copy of K with `m` channels per page.

        Args:
            layout: Layout with the same rows of keys and values; None keeps the current one.

        Returns:
            Simulated time at which the new copy is written, ns.
        """
        form = self.kv.sequence(handle).layout
        new = (layout or form.layout).paged(form.page_bytes, form.head_dim, m)
        return relayout(self.reader, handle, new, start_ns)

    def flush(self, start_ns: int) -> int:
        """Make all earlier changes durable; returns the simulated time at which they are in flash, ns."""
        finish_ns = max(self.collector.reclaim(start_ns, everything=True), self.timing.idle_ns())
        assert not self.kv.changes.dirty and not self.kv.changes.freed, "a flush left changes out of the journal"
        self.nand.sync()
        self.nand.release_erased()
        return finish_ns

    def format(self, start_ns: int) -> int:
        """Free all sequences and logical pages and erase them; keeps wear and counters. Returns when it ends, ns."""
        self.free(list(self.sequences), start_ns)
        self.blocks.discard(0, self.blocks.pages)
        return self.flush(self.collector.reclaim(start_ns, everything=True))

    def view(self, handles: Seq[int], layer: int) -> KvSlotView:
        """Return the slots of one layer of sequences that share a layout."""
        return self.reader.view(handles, layer)

    def token_pages(self, view: KvSlotView, slots: U32, tokens: I32, counts: I64) -> PagePlan:
        """Pages of `slots` (k_slots or v_slots) for ascending tokens (N, k); the first counts[n] of a row are valid."""
        return self.reader.token_pages(view, slots, tokens, counts)

    def embedding_pages(self, view: KvSlotView, channels: I32) -> PagePlan:
        """Pages for ascending channels (N, r), without those in drive DRAM or in the page cache."""
        return self.reader.embedding_pages(view, channels)

    def refined_pages(self, view: KvSlotView, tokens: I32, counts: I64) -> PagePlan:
        """Pages of INT8 rows for ascending tokens (N, k); the first counts[n] of a row are valid."""
        return self.reader.refined_pages(view, tokens, counts)

    def coarse_pages(self, view: KvSlotView, name: str, groups: Bools | None = None) -> PagePlan:
        """Pages of the low-bit map `name`; `groups` (N, groups) selects groups, None selects all."""
        return self.reader.coarse_pages(view, name, groups)

    def table_pages(self, nbytes: I64) -> PagePlan:
        """Pages of tables of `nbytes` (N,) bytes."""
        return self.reader.table_pages(nbytes)

    def read_back(self, handle: int, layer: int, tokens: range | None = None) -> tuple[F16, F16, PagePlan]:
        """Keys and values of a layer's tokens (None: all), each (tokens, H, d), and the pages that hold them."""
        return self.reader.read_back(handle, layer, tokens)

    def read_ranges(self, ranges: Seq[tuple[int, range]], layers: range) -> tuple[F16, F16, list[PagePlan]]:
        """Keys and values of ranges of sequences, each (layers, tokens of all, H, d), and their pages."""
        return self.reader.read_ranges(ranges, layers)

    def read(self, plan: PagePlan, start_ns: int) -> int:
        """Read the pages of a plan into the attention engine; returns when the last arrives, ns.

        Raises:
            UncorrectableReadError: A page has more bit errors than the ECC corrects.
        """
        return self.store.read(plan, start_ns)

    def programs_end_ns(self, plans: Seq[PagePlan], start_ns: int) -> int:
        """When programs and erases release the lanes that `plans` read from, ns; start_ns if all lanes are free."""
        timing = self.timing
        if timing.programmed_ns <= start_ns:
            return start_ns
        return max(start_ns, *(timing.free_ns(plan.ppns) for plan in plans))

    def pipeline(
        self,
        stages: Seq[ReadStage | UnitStage],
        pools: Seq[int],
        start_ns: int,
        tracer: StageTracer | None = None,
    ) -> list[CriticalStage]:
        """Schedule reads together with the work of compute units; see `ftl.flash.pipeline`."""
        return pipeline(self.store, stages, pools, start_ns, tracer)
