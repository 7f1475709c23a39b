"""One sequence's share on this drive."""

from __future__ import annotations

import numpy as np

from csd_spec import PageForm
from csd_spec.arrays import F32, I64, U16, U32
from ftl.flash.placement import Writer
from ftl.kv.layouts import GroupMap, PrimaryMap, maps_of

Rows = dict[str, U16 | None]  # "k" and "v", each (tokens, H, d) FP16 bits; None on a drive without payload


class Sequence:
    """Lengths per layer, the maps of its layout, and who owns which pages.

    Pages carry the number of an *owner* in their tag. A sequence writes as its newest owner; what it shares with the
    sequence that it was forked from, or wrote before a crop, belongs to earlier ones. owners[layer] lists (owner,
    tokens): groups that are full within the first `tokens` belong to that owner, the rest to the next; the last
    entry is the present owner.
    """

    def __init__(self, handle: int, layout: PageForm, layers: int, heads: int, writer: Writer) -> None:
        self.handle, self.layout, self.layers, self.heads = handle, layout, layers, heads
        self.lengths: I64 = np.zeros(layers, np.int64)
        self.maps: dict[str, GroupMap] = maps_of(layout, layers, heads)
        self.primary = {name: mapped for name, mapped in self.maps.items() if isinstance(mapped, PrimaryMap)}
        self.holding = {"v": self.primary["k"]} | self.primary if layout.latent else self.primary  # rows by source
        self.newest = -1
        self.owners: list[list[tuple[int, int]]] = [[] for _ in range(layers)]
        self.writer = writer
        self.failed = False  # lost data to bit errors: can only be freed
        self.names: dict[bytes, int] = {}  # prefixes by key, in tokens; the key of a value, in bytes
        self.label = 0  # what the layer above keeps with it
        self.v_sums: F32 | None = None  # (layers, H, d), where it keeps the sum of V too

    @property
    def copies(self) -> list[GroupMap]:
        """The maps that are not primary."""
        return [mapped for mapped in self.maps.values() if not mapped.primary]

    def rows(self, banks: tuple[U16, U16], source: str, layer: int, tokens: range) -> U16:
        """Rows (tokens, H, d) of K or V as they are stored; (tokens, H, 2 d) of both."""
        parts = [self.holding[name].rows(banks, layer, tokens) for name in source]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)

    def stored_in(self, source: str, layer: int, tokens: range) -> U32:
        """Slots (streams, groups) of the pages with those rows."""
        holders = dict.fromkeys(self.holding[name].holder for name in source)
        ends = [(each, tokens.start // each.per_group, -(-tokens.stop // each.per_group)) for each in holders]
        return np.concatenate([each.slots[layer, :, first:last] for each, first, last in ends])

    @property
    def all_owners(self) -> set[int]:
        return {owner for chain in self.owners for owner, _ in chain} | {self.newest}

    def owner_of(self, layer: int, per_group: int, group: int) -> int:
        """Owner of a full group."""
        return next(owner for owner, tokens in self.owners[layer] if tokens < 0 or group < tokens // per_group)

    def owners_of(self, layer: int, per_group: int, groups: int) -> I64:
        """Owners (groups,) of the first full groups."""
        chain = self.owners[layer]
        ends = [groups if tokens < 0 else tokens // per_group for _, tokens in chain]
        which = np.searchsorted(ends, np.arange(groups), side="right")
        owners: I64 = np.array([owner for owner, _ in chain], np.int64)[which]
        return owners

    def write_as(self, layer: int, owner: int, tokens: int) -> None:
        """Groups full within `tokens` stay with those who wrote them; `owner` writes from there on."""
        chain = [(old, tokens if kept < 0 else min(kept, tokens)) for old, kept in self.owners[layer]]
        sizes = {mapped.per_group for mapped in self.maps.values()}  # of which none need divide another
        pruned: list[tuple[int, int]] = []
        for old, kept in chain:
            before = pruned[-1][1] if pruned else 0
            if any(kept // size > before // size for size in sizes):
                pruned.append((old, kept))
        self.owners[layer] = [*pruned, (owner, -1)]

    def expect(self, tokens: int) -> None:
        """Every layer is likely to grow to `tokens`: the writer opens extents for the pages that no layer has yet."""
        stored = (mapped for mapped in self.maps.values() if mapped.programmed)
        groups = sum(m.streams * (tokens // m.per_group - self.lengths // m.per_group).clip(0).sum() for m in stored)
        self.writer.expected_pages = max(self.writer.expected_pages, self.writer.written + int(groups))
