"""Cached inputs of one layer of sequences that grow by a token: `LayerPlan`.

Most tokens only append a row to groups that are open in drive DRAM. Until a group begins, ends or moves, the slots,
page plans and buffers stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np

from csd_spec import KvSlotView
from csd_spec.arrays import F16, I64, U16, U32
from csd_spec.view import UNMAPPED
from ftl.flash.plan import PagePlan
from ftl.kv.layouts.group_map import GroupMap, InPlaceMap
from ftl.kv.layouts.packing import append_rows
from ftl.kv.pages import stack
from ftl.kv.sequence import Sequence


class LayerPlan:
    """Inputs of views and of single tokens, valid during one epoch of the KV map; `view` needs sequences of one layout.

    Lengths are read from the sequences, since another batch may have appended tokens in the same epoch.

    Attributes:
        page_plans: Plans of all pages of a map, by its name.
        user_data: What a user of the plan keeps as long as it is valid.
    """

    def __init__(self, seqs: Seq[Sequence], layer: int, banks: tuple[U16, U16]) -> None:
        self.seqs, self.layer, self.banks = seqs, layer, banks
        self.lengths = [seq.lengths for seq in seqs]
        self.page_plans: dict[str, PagePlan] = {}
        self.layout, self.heads = seqs[0].layout, seqs[0].heads
        self.user_data: dict[str, Any] = {}

    def stored(self) -> list[int]:
        """Tokens of each sequence."""
        return [lengths.item(self.layer) for lengths in self.lengths]

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Per sequence: lengths (first, end) at which one more token neither begins nor completes a group."""
        bounds = []
        for seq, length in zip(self.seqs, self.stored(), strict=True):
            begins = [length - length % mapped.per_group for mapped in seq.maps.values()]
            ends = [begin + mapped.per_group for begin, mapped in zip(begins, seq.maps.values(), strict=True)]
            bounds.append((max(begins) + 1, min(ends) - 1))
            assert length < min(ends), f"sequence {seq.handle}: {length} tokens are beyond its open groups"
        return bounds

    def in_bounds(self) -> bool:
        """Whether one more token of each sequence only extends open groups."""
        for lengths, (low, end) in zip(self.lengths, self.bounds, strict=True):
            if not low <= lengths.item(self.layer) < end:
                return False
        return True

    @cached_property
    def _open_groups(self) -> list[tuple[int, GroupMap]]:
        """Sequence number and map of every group that is open in page buffers."""
        maps = ((number, mapped) for number, seq in enumerate(self.seqs) for mapped in seq.maps.values())
        return [(number, mapped) for number, mapped in maps if mapped.buffered(self.layer)]

    @cached_property
    def in_place_groups(self) -> tuple[I64, I64]:
        """Buffers and formats, as `append_rows` takes them, of the open groups that store rows unmodified."""
        in_place = [(number, mapped) for number, mapped in self._open_groups if isinstance(mapped, InPlaceMap)]
        at = np.zeros((len(in_place), max((mapped.streams for _, mapped in in_place), default=0), 1), np.int64)
        forms = np.empty((len(in_place), 4), np.int64)
        for i, (number, mapped) in enumerate(in_place):
            at[i, : mapped.streams, 0] = mapped.buffers[self.layer]
            forms[i] = number, mapped.per_group, mapped.channels, mapped.source == "v"
        assert (at >= 0).all(), "a row would go to a buffer that the group does not have"
        return at, forms

    @cached_property
    def encoded_groups(self) -> list[tuple[int, GroupMap]]:
        """Sequence number and map of the other open groups."""
        return [(number, mapped) for number, mapped in self._open_groups if not isinstance(mapped, InPlaceMap)]

    def append(self, k: F16 | None, v: F16 | None) -> None:
        """Append a token k, v (B, H, d) to each sequence's buffered groups; it must be in bounds."""
        stored, layer = self.stored(), self.layer
        if k is not None and v is not None:
            content, rows = self.banks[1], {"k": k.view(np.uint16), "v": v.view(np.uint16)}
            append_rows(content, *self.in_place_groups, np.array(stored), rows["k"], rows["v"])
            for number, mapped in self.encoded_groups:
                row = rows[mapped.source][number : number + 1]
                mapped.fill(content, mapped.buffers[layer], stored[number] % mapped.per_group, row)
        self.count_token()

    def count_token(self) -> None:
        """Increment each sequence's length after its row was written to the buffers."""
        for lengths in self.lengths:
            lengths[self.layer] += 1

    @cached_property
    def _slots(self) -> dict[str, U32]:
        """Slots of all maps by name, (N, pages per head, groups)."""
        longest, slots = max(self.stored()), {}
        for name, mapped in self.seqs[0].maps.items():
            groups = -(-longest // mapped.per_group)
            stacked = stack([seq.maps[name].slots[self.layer] for seq in self.seqs], groups)
            slots[name] = stacked.reshape(len(self.seqs) * self.heads, mapped.streams // self.heads, groups)
        return slots

    @cached_property
    def _view_slots(self) -> tuple[U32, U32, U32]:
        """Slots of K, of V, and of the embedding-indexed copy of K, in the layout of a view."""
        none, copy = np.empty((len(self.seqs) * self.heads, 1, 0), np.uint32), self._slots.get("embedding_k")
        k = self._slots.get("k", none).transpose(0, 2, 1).reshape(none.shape[0], -1)
        v = k if self.layout.latent else self._slots.get("v", none)[:, 0]
        groups = -(-max(self.stored()) // self.layout.T)
        return k, v, np.full((k.shape[0], 1, groups), UNMAPPED) if copy is None else copy

    def view(self) -> KvSlotView:
        """Return a view of the layer at the sequences' current lengths."""
        seq_lens = np.array(self.stored()).repeat(self.heads)
        return KvSlotView(self.layout, self.banks, seq_lens, *self._view_slots, self._slots, self.page_plans)
