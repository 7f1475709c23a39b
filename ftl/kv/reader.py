"""Reads: slots of one layer, page plans of selections, and stored keys and values.

The pages of a plan are resident when the plan is returned, including those that the drive's cache saves from a read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from csd_spec import KvSlotView
from csd_spec.arrays import F16, I32, I64, U32, Bools
from csd_spec.view import UNMAPPED, in_flash
from ftl.flash.plan import PagePlan
from ftl.kv.map import KvMap
from ftl.kv.pages import PageList, plan_channels, plan_tokens


class Reader:
    """Creates views of sequences and page plans; simulated reads happen only in `FlashStore.read`."""

    def __init__(self, kv: KvMap) -> None:
        self.kv, self.store = kv, kv.store
        self._word_bytes = kv.store.spec.timing.codeword_bytes or 0  # transfer unit of a channel; 0: whole pages

    def view(self, handles: Seq[int], layer: int, alone: bool = True) -> KvSlotView:
        """Return the slots of one layer of sequences that share a layout; zero-copy for a single sequence.

        Args:
            alone: Begin a new turn: pages of earlier views may be evicted.
        """
        if alone:
            self.store.nand.page_store.begin()
        return self.kv.plan(handles, layer).view()

    def token_pages(self, view: KvSlotView, slots: U32, tokens: I32, counts: I64) -> PagePlan:
        """Pages of `slots` (k_slots or v_slots) for ascending tokens (N, k); the first counts[n] of a row are valid."""
        if counts is view.seq_lens and (slots is view.k_slots or slots is view.v_slots):
            return self._whole_map(view, "k" if slots is view.k_slots else "v", slots, tokens)
        return self._tokens(view, slots, tokens, counts)

    def _tokens(self, view: KvSlotView, slots: U32, tokens: I32, counts: I64) -> PagePlan:
        row_bytes = view.layout.row_bytes
        return self._plan(plan_tokens(slots, tokens, counts, view.layout.n, row_bytes, self._word_bytes))

    def _whole_map(self, view: KvSlotView, name: str, slots: U32, tokens: I32) -> PagePlan:
        """All pages of K or V; the plan is cached until a group is full."""
        plan: PagePlan | None = view.kept.get(name)
        if plan is None:
            plan = view.kept[name] = self._tokens(view, slots, tokens, view.seq_lens)
        else:
            self.store.page_in(plan.ppns)
        return plan

    def embedding_pages(self, view: KvSlotView, channels: I32) -> PagePlan:
        """Pages for ascending channels (N, r): embedding pages, or pages of K for groups without them.

        Hits in the drive's page cache are left out.
        """
        slots, lay = (view.e_slots, view.k_slots), view.layout
        of_row = lay.row_bytes, max(1, lay.row_bytes // lay.head_dim)
        shape = lay.m, lay.T, lay.n, *of_row, lay.run_bytes, lay.scale_bytes
        plan = self._plan(plan_channels(*slots, channels, view.seq_lens, *shape, self._word_bytes))
        missed = self.store.cache.touch(plan.ppns)
        self.store.counters.cached += plan.ppns.size - int(missed.sum())
        return plan.only(missed)

    def refined_pages(self, view: KvSlotView, tokens: I32, counts: I64) -> PagePlan:
        """Pages of INT8 rows for ascending tokens (N, k), read as whole pages."""
        row_bytes = (2 - view.layout.latent) * view.layout.head_dim
        slots = view.maps["refined"][:, 0]
        pages = plan_tokens(slots, tokens, counts, view.layout.n, row_bytes, 0)
        return self._whole(pages.ppns, pages.useful, pages.ends)

    def coarse_pages(self, view: KvSlotView, name: str, groups: Bools | None = None) -> PagePlan:
        """Pages of the map `scores` or `values`, read as whole pages; `groups` (N, groups) selects, None means all.

        Tokens without a score page get exact scores from their refined pages, which are made resident here, too.
        """
        slots = view.maps[name]
        stored = in_flash(slots) if groups is None else in_flash(slots) & groups[:, None]
        if name == "scores":
            held = (slots[:, 0] != UNMAPPED).sum(1).min()
            refined = view.maps["refined"][:, 0, int(held) * view.layout.T // view.layout.n :]
            self.store.page_in(refined[in_flash(refined)])
        useful = np.full(int(stored.sum()), self.store.geometry.page_bytes)
        return self._whole(slots[stored], useful, np.cumsum(stored.sum((1, 2))))

    def _whole(self, ppns: U32, useful: I64, ends: I64) -> PagePlan:
        assert ends[-1] == ppns.size == useful.size, "streams end before the last page"
        self.store.page_in(ppns)
        return PagePlan(ppns, useful, np.full(ppns.size, self.store.geometry.page_bytes), ends)

    def table_pages(self, nbytes: I64) -> PagePlan:
        """Pages of tables of `nbytes` (N,) bytes, each from a new page on, over all lanes; only their time counts."""
        size = self.store.geometry.page_bytes
        pages = -(-nbytes // size)
        ends = np.cumsum(pages)
        useful = np.full(int(pages.sum()), size)
        useful[ends[pages > 0] - 1] = (nbytes - (pages - 1) * size)[pages > 0]
        ppns = np.arange(useful.size, dtype=np.uint32) % np.uint32(self.store.geometry.lanes)
        word = self._word_bytes or size
        return PagePlan(ppns, useful, -(-useful // word) * word, ends, stored=False)

    def _plan(self, pages: PageList) -> PagePlan:
        assert not pages.ends.size or pages.ends[-1] == pages.ppns.size, "streams end before the last page"
        self.store.page_in(pages.ppns)
        nbytes = pages.words * (self._word_bytes or self.store.geometry.page_bytes)
        return PagePlan(pages.ppns, pages.useful, nbytes, pages.ends)

    def read_ranges(self, ranges: Seq[tuple[int, range]], layers: range) -> tuple[F16, F16, list[PagePlan]]:
        """Keys and values of ranges of sequences of one shape, each (layers, tokens of all, H, d), and their pages.

        All pages are requested from the medium at once.
        """
        self.store.nand.page_store.begin()
        seqs = [(self.kv.sequence(handle), tokens) for handle, tokens in ranges]
        stored = [
            seq.stored_in(name, layer, tokens).ravel() for layer in layers for seq, tokens in seqs for name in "kv"
        ]
        slots = np.concatenate(stored)
        self.store.page_in(slots[in_flash(slots)])
        rows = [self.read_back(handle, layer, tokens, alone=False) for layer in layers for handle, tokens in ranges]
        width = len(ranges)
        k, v = (
            np.stack([np.concatenate([part[i] for part in rows[at : at + width]]) for at in range(0, len(rows), width)])
            for i in range(2)
        )
        return k, v, [plan for _, _, plan in rows]

    def read_back(
        self, handle: int, layer: int, tokens: range | None = None, alone: bool = True
    ) -> tuple[F16, F16, PagePlan]:
        """Keys and values of a layer's tokens (None: all), each (tokens, H, d), and the pages that hold them.

        Args:
            alone: Begin a new turn; False keeps pages of earlier reads resident.
        """
        seq = self.kv.sequence(handle)
        tokens = range(int(seq.lengths[layer])) if tokens is None else tokens
        view = self.view([handle], layer, alone)
        wanted = np.broadcast_to(np.array(tokens, np.int32), (seq.heads, len(tokens)))
        counts = np.full(seq.heads, len(tokens))
        if not view.layout.keeps_rows:
            plans = [self.refined_pages(view, wanted, counts)]
        else:
            stored = (view.k_slots,) if view.layout.latent else (view.k_slots, view.v_slots)
            plans = [self.token_pages(view, slots, wanted, counts) for slots in stored]
        columns = zip(*((p.ppns, p.useful, p.nbytes) for p in plans), strict=True)
        ppns, useful, nbytes = (np.concatenate(column) for column in columns)
        plan = PagePlan(ppns, useful, nbytes, np.array([ppns.size]))
        k, v = (self.kv.rows(seq, name, layer, tokens).view(np.float16) for name in "kv")
        return k, v, plan
