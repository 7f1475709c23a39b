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
from ftl.kv.layouts.group_map import GroupMap, LaidMap
from ftl.kv.layouts.lay import lay_each
from ftl.kv.pages import stack
from ftl.kv.sequence import Sequence


class Standing:
    """Of sequences; a view is of those that share a layout. Lengths are always asked of the sequences, since others may
    add to them too.

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
    def bounds(self) -> list[tuple[int, int]]:
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
        known = zip(self.lengths, self.bounds, strict=True)
        return all(low <= lengths[self.layer] < end for lengths, (low, end) in known)

    @cached_property
    def _waiting(self) -> list[tuple[int, GroupMap]]:
        """Maps whose group under construction has page buffers, and which sequence each is of."""
        each = ((number, mapped) for number, seq in enumerate(self.seqs) for mapped in seq.maps.values())
        return [(number, mapped) for number, mapped in each if mapped.buffered(self.layer)]

    @cached_property
    def laid(self) -> tuple[I64, I64]:
        """Of maps whose groups wait, those whose rows lie as they come, as `lay_each` takes them: pages and forms."""
        found = [(number, mapped) for number, mapped in self._waiting if isinstance(mapped, LaidMap)]
        at = np.zeros((len(found), max((mapped.streams for _, mapped in found), default=0), 1), np.int64)
        forms = np.empty((len(found), 4), np.int64)
        for i, (number, mapped) in enumerate(found):
            at[i, : mapped.streams, 0] = mapped.buffers[self.layer]
            forms[i] = number, mapped.per_group, mapped.channels, mapped.source == "v"
        return at, forms

    @cached_property
    def others(self) -> list[tuple[int, GroupMap]]:
        """The rest of them."""
        return [(number, mapped) for number, mapped in self._waiting if not isinstance(mapped, LaidMap)]

    def wait(self, k: F16 | None, v: F16 | None) -> None:
        """Add a token k, v (B, H, d) of each sequence to the groups that wait, as far as they have buffers."""
        stored, layer = self.stored(), self.layer
        if k is not None and v is not None:
            content, rows = self.banks[1], {"k": k.view(np.uint16), "v": v.view(np.uint16)}
            lay_each(content, *self.laid, np.array(stored), rows["k"], rows["v"])
            for number, mapped in self.others:
                row = rows[mapped.source][number : number + 1]
                mapped.fill(content, mapped.buffers[layer], stored[number] % mapped.per_group, row)
        self.grow()

    def grow(self) -> None:
        """Each sequence has got a token."""
        for lengths in self.lengths:
            lengths[self.layer] += 1

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
        k = self._slots.get("k", none).transpose(0, 2, 1).reshape(none.shape[0], -1)
        v = k if self.layout.latent else self._slots.get("v", none)[:, 0]
        groups = -(-max(self.stored()) // self.layout.T)
        return k, v, np.full((k.shape[0], 1, groups), UNMAPPED) if copy is None else copy

    def view(self) -> KvView:
        """The sequences' layer as it is now."""
        seq_lens = np.array(self.stored()).repeat(self.heads)
        return KvView(self.layout, self.banks, seq_lens, *self._known, self._slots, self.whole)
