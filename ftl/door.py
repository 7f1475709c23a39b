"""The translation layer's one door: flash store, KV map, block namespace and journal, wired together."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from csd_spec import DriveSpec, KvView, Layout, PageForm
from csd_spec.arrays import F16, I32, I64, U32, Bools
from ftl.block import BlockNamespace
from ftl.flash.collect import Collector
from ftl.flash.nand import Nand
from ftl.flash.pipeline import Fetch, Link, Use, pipeline
from ftl.flash.plan import PagePlan
from ftl.flash.store import FlashStore
from ftl.journal import Journal
from ftl.kv import edit, values
from ftl.kv.append import append
from ftl.kv.map import KvMap
from ftl.kv.reading import Reader
from ftl.kv.relayout import relayout
from ftl.kv.sequence import Sequence
from ftl.recovery import recover


class Ftl:
    """Sequences of K and V over NAND, drive DRAM and their modelled time.

    Every verb checks first and then acts: when it raises FtlError nothing has changed. What a `flush` has
    acknowledged survives a loss of power at any moment: an Ftl made on the same Nand finds it again.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None = None) -> None:
        self.spec = spec
        self.store = FlashStore(spec, nand)
        self.kv = KvMap(self.store, spec.dram_bytes - spec.cache_bytes)
        self.blocks = BlockNamespace(self.store)
        self.journal = Journal(self.kv, self.blocks)
        self.collector = Collector(self.store, self.journal)
        self.reader = Reader(self.kv)
        self.store.referrers += [self.kv, self.blocks, self.journal]
        self.store.reclaim = self.collector
        self.nand, self.timing, self.placement = self.store.nand, self.store.timing, self.store.placement
        self.counters, self.buffers, self.sequences = self.store.counters, self.kv.buffers, self.kv.sequences
        self.findings = recover(self.journal)  # what power-on has found lost

    def close(self) -> None:
        """Give back files, memory and address space (2 TB of it) at once.

        The parts refer to each other in circles, which otherwise stay until the garbage collector runs.
        """
        self.nand.held.close()
        self.store.reclaim = None
        self.store.referrers.clear()

    def sequence(self, handle: int) -> Sequence:
        """The sequence of a handle; raises UnknownSequence, or Uncorrectable for one that lost data."""
        return self.kv.sequence(handle)

    def create(self, count: int, layers: int, heads: int, layout: PageForm) -> list[int]:
        """Open sequences; returns their handles. Costs nothing until tokens come. Raises OutOfSpace."""
        return self.kv.create(count, layers, heads, layout)

    def label(self, handles: Seq[int], label: int) -> None:
        """Keep a number with sequences for whoever named them; it survives with them."""
        for seq in map(self.kv.sequences.__getitem__, handles):
            self.kv.usage.remove(seq)
            seq.label = label
            self.kv.usage.add(seq)

    def append(
        self, handles: Seq[int], layer: int, lengths: I64, k: F16 | None, v: F16 | None, start_ns: int
    ) -> tuple[int, int]:
        """Add rows k, v (sum of lengths, H, d) to a layer; see `ftl.kv.append`."""
        return append(self.kv, handles, layer, lengths, k, v, start_ns)

    def fork(self, handle: int) -> int:
        """A sequence that begins with all that this one holds. Full groups are shared, unfinished ones copied."""
        return edit.fork(self.kv, handle)

    def name(self, handle: int, keys: Seq[bytes], tokens: Seq[int]) -> None:
        """Find prefixes of a sequence under keys; its label says who does. They survive with its tokens."""
        seq = self.kv.sequence(handle)
        changed = self.kv.names.bind(seq, keys, tokens) | {handle}
        self.kv.changes.dirty |= changed
        self.kv.changes.named |= changed

    def store_value(
        self, label: int, key: bytes, value: bytes | bytearray | memoryview, start_ns: int
    ) -> tuple[int, int]:
        """Store a value under a key; see `ftl.kv.values`. A value that had the key has none then, and is to be freed.

        Returns its handle and when it is in flash, ns. Raises FtlError; nothing has changed then.
        """
        handle, finish_ns = values.store(self.kv, label, value, start_ns)
        self.name(handle, [key], [len(value)])
        return handle, finish_ns

    def read_value(self, handle: int, size_bytes: int, start_ns: int) -> tuple[bytes, int]:
        """The first `size_bytes` of a value, and when they have been read, ns. Raises Uncorrectable."""
        rows = values.rows_of(size_bytes, self.spec.geometry.page_bytes)
        k, v, plan = self.read_back(handle, 0, range(rows))
        return values.joined(k, v, size_bytes), self.read(plan, start_ns)

    def unname(self, label: int, keys: Seq[bytes]) -> None:
        """Forget keys."""
        changed = self.kv.names.unbind(label, keys)
        self.kv.changes.dirty |= changed
        self.kv.changes.named |= changed

    def crop(self, handle: int, layer: int, length: int, start_ns: int) -> int:
        """Keep the first `length` tokens of a layer; returns when a group that was cut is in drive DRAM again."""
        return edit.crop(self.kv, handle, layer, length, start_ns)

    def free(self, handles: Seq[int], start_ns: int) -> None:
        """Forget sequences; raises UnknownSequence before any is."""
        edit.free(self.kv, handles)
        if len(self.placement.erasable_blocks()) > self.spec.geometry.blocks // 128:
            self.collector.reclaim(start_ns, everything=False)  # many free blocks: the least worn can be chosen

    def relayout(self, handle: int, m: int, start_ns: int, layout: Layout | None = None) -> int:
        """Change the form of embedding pages at run time; returns when the new copy of K is written.

        layout: one with the same rows of K and V; None is the present one.
        """
        form = self.kv.sequence(handle).layout
        new = (layout or form.layout).paged(form.page_bytes, form.head_dim, m)
        return relayout(self.reader, handle, new, start_ns)

    def flush(self, start_ns: int) -> int:
        """Acknowledge: returns when everything that was done before is in flash."""
        finish_ns = max(self.collector.reclaim(start_ns, everything=True), self.timing.idle_ns())
        self.nand.sync()
        self.nand.give_back()
        return finish_ns

    def format(self, start_ns: int) -> int:
        """Forget all sequences and blocks, and erase them; wear and counters stay. Returns when it is done."""
        self.free(list(self.sequences), start_ns)
        self.blocks.discard(0, self.blocks.pages)
        return self.flush(self.collector.reclaim(start_ns, everything=True))

    def view(self, handles: Seq[int], layer: int) -> KvView:
        """Slots of one layer of sequences that share a layout."""
        return self.reader.view(handles, layer)

    def token_pages(self, view: KvView, slots: U32, tokens: I32, counts: I64) -> PagePlan:
        """Pages of `slots` (k_slots or v_slots) behind tokens (N, k), ascending, of which counts (N,) are used."""
        return self.reader.token_pages(view, slots, tokens, counts)

    def embedding_pages(self, view: KvView, channels: I32) -> PagePlan:
        """Pages behind channels (N, r), ascending, less those in drive DRAM."""
        return self.reader.embedding_pages(view, channels)

    def refined_pages(self, view: KvView, tokens: I32, counts: I64) -> PagePlan:
        """Pages with K and V in 8 bits of tokens (N, k), ascending, of which counts (N,) are used."""
        return self.reader.refined_pages(view, tokens, counts)

    def coarse_pages(self, view: KvView, name: str, groups: Bools | None = None) -> PagePlan:
        """Pages of a map of K or V in few bits, all where no groups (N, groups) are named."""
        return self.reader.coarse_pages(view, name, groups)

    def table_pages(self, nbytes: I64) -> PagePlan:
        """Pages of tables of nbytes (N,)."""
        return self.reader.table_pages(nbytes)

    def read_back(self, handle: int, layer: int, tokens: range | None = None) -> tuple[F16, F16, PagePlan]:
        """K and V of a layer's tokens, all where none are named, each (tokens, H, d), and the pages they come from."""
        return self.reader.read_back(handle, layer, tokens)

    def read_ranges(self, ranges: Seq[tuple[int, range]], layers: range) -> tuple[F16, F16, list[PagePlan]]:
        """K and V of ranges of sequences, each (layers, tokens of all, H, d), and their pages."""
        return self.reader.read_ranges(ranges, layers)

    def read(self, plan: PagePlan, start_ns: int) -> int:
        """Bring a plan's pages to the engine; returns when all are there. Raises Uncorrectable."""
        return self.store.read(plan, start_ns)

    def programs_end_ns(self, plans: Seq[PagePlan], start_ns: int) -> int:
        """Until when programs and erases keep some of the lanes that plans are read from; start_ns where none does."""
        timing = self.timing
        if timing.programmed_ns <= start_ns:
            return start_ns
        return max(start_ns, *(timing.free_ns(plan.ppns) for plan in plans))

    def pipeline(self, stages: Seq[Fetch | Use], pools: Seq[int], start_ns: int) -> list[Link]:
        """Reads between the work of units; see `ftl.flash.pipeline`. Raises Uncorrectable."""
        return pipeline(self.store, stages, pools, start_ns)
