"""What stays as it is of a layer of some sequences while tokens only join groups that wait: what a decode step needs of
their tables, made once for the steps between two changes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property

import numpy as np

from csd_spec import KvView
from csd_spec.arrays import F16, I64, U16, U32
from csd_spec.view import UNMAPPED
from ftl.flash.plan import PagePlan
from ftl.kv.layouts.group_map import LaidMap
from ftl.kv.layouts.lay import lay_each
from ftl.kv.pages import stack
from ftl.kv.sequence import Sequence


class Standing:
    """Of sequences that share a layout. Lengths are always asked of the sequences, since others may add to them too.

    whole: plans of all pages of a map, by its name.
    """

    def __init__(self, seqs: Seq[Sequence], layer: int, banks: tuple[U16, U16]) -> None:
        self.seqs, self.layer, self.banks = seqs, layer, banks
        self.lengths = [seq.lengths for seq in seqs]
        self.whole: dict[str, PagePlan] = {}
        first = seqs[0]
        self.layout, self.heads = first.layout, first.heads

    def stored(self) -> list[int]:
        """Tokens of each sequence."""
        layer = self.layer
        return [int(lengths[layer]) for lengths in self.lengths]

    @cached_property
    def _between(self) -> list[tuple[int, int]]:
        """Of each sequence the lengths, from the first to before the last, at which one more token neither begins nor
        ends a group."""
        bounds = []
        for seq, length in zip(self.seqs, self.stored(), strict=True):
            begins = [length - length % mapped.per_group for mapped in seq.maps.values()]
            ends = [begin + mapped.per_group for begin, mapped in zip(begins, seq.maps.values(), strict=True)]
            bounds.append((max(begins) + 1, min(ends) - 1))
        return bounds

    def waits(self) -> bool:
        """Whether one token more of each sequence only joins groups that wait: what most decode steps add."""
        return all(low <= length < end for length, (low, end) in zip(self.stored(), self._between, strict=True))

    @cached_property
    def _laid(self) -> tuple[I64, I64]:
        """Of groups whose rows lie in page buffers as they come: `lay_each`'s firsts and forms."""
        names = [name for name, mapped in self.seqs[0].maps.items() if isinstance(mapped, LaidMap)]
        maps = [[seq.maps[name] for seq in self.seqs] for name in names]
        streams = max(mapped.streams for mapped, *_ in maps)
        firsts = np.full((len(maps), len(self.seqs), streams), -1)
        for each, row in zip(maps, firsts, strict=True):
            for mapped, mine in zip(each, row, strict=True):
                mine[: mapped.streams] = mapped.buffers[self.layer]
        forms = [(mapped.per_group, mapped.channels, mapped.source == "v") for mapped, *_ in maps]  # type: ignore[attr-defined]  # LaidMap all
        return firsts, np.array(forms, np.int64)

    @cached_property
    def _others(self) -> list[str]:
        return [
            name
            for name, mapped in self.seqs[0].maps.items()
            if not isinstance(mapped, LaidMap) and any(seq.maps[name].buffered(self.layer) for seq in self.seqs)
        ]

    def wait(self, k: F16 | None, v: F16 | None) -> None:
        """Add a token k, v (B, H, d) of each sequence to the groups that wait, as far as they have buffers."""
        stored, layer = self.stored(), self.layer
        if k is not None and v is not None:
            content, rows = self.banks[1], {"k": k.view(np.uint16), "v": v.view(np.uint16)}
            lay_each(content, *self._laid, np.array(stored), rows["k"], rows["v"])
            for name in self._others:
                for number, (seq, length) in enumerate(zip(self.seqs, stored, strict=True)):
                    mapped = seq.maps[name]
                    if mapped.buffered(layer):
                        row = rows[mapped.source][number : number + 1]
                        mapped.fill(content, mapped.buffers[layer], length % mapped.per_group, row)
        for lengths in self.lengths:
            lengths[layer] += 1

    @cached_property
    def _slots(self) -> dict[str, U32]:
        """Of all maps by name: (N, pages of a head, groups)."""
        longest, found = max(self.stored()), {}
        for name, mapped in self.seqs[0].maps.items():
            groups = -(-longest // mapped.per_group)
            slots = stack([seq.maps[name].slots[self.layer] for seq in self.seqs], groups)
            found[name] = slots.reshape(len(self.seqs) * self.heads, mapped.streams // self.heads, groups)
        return found

    @cached_property
    def _known(self) -> tuple[U32, U32, U32]:
        """Slots of K, of V, and of the copy of K, as a view has them."""
        none, copy = np.empty((len(self.seqs) * self.heads, 1, 0), np.uint32), self._slots.get("embedding_k")
        k, v = (self._slots.get(name, none)[:, 0] for name in "kv")
        groups = -(-max(self.stored()) // self.layout.T)
        return k, v, np.full((k.shape[0], 1, groups), UNMAPPED) if copy is None else copy

    def view(self) -> KvView:
        """The sequences' layer as it is now."""
        seq_lens = np.array(self.stored()).repeat(self.heads)
        return KvView(self.layout, self.banks, seq_lens, *self._known, self._slots, self.whole)
