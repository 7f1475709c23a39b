"""State of one sequence on a drive."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from csd_spec import PageFormat
from csd_spec.arrays import F32, I64, U16, U32
from csd_spec.view import in_flash
from ftl.flash.placement import Writer
from ftl.kv.layouts import GroupMap, PrimaryMap, maps_of

Rows = dict[str, U16 | None]  # "k" and "v", each (tokens, H, d) FP16 bits; None on a drive without payload


@dataclass(slots=True)
class KeptSequence:
    """What is known of a sequence whose layout is not loaded: it stays as it is, and can only be freed.

    Attributes:
        described: Its description in the journal.
        rows: Its rows in the journal.
        pages: Its pages, (N,).
    """

    described: dict[str, Any]
    rows: bytes
    pages: U32


class Sequence:
    """Lengths per layer, the maps of its layout, and the owners of its pages.

    Pages carry an *owner* number in their tag. A sequence writes with its newest owner number; pages shared with the
    sequence it was forked from, or written before a truncation, belong to earlier owners. owners[layer] lists (owner,
    tokens): groups that are full within the first `tokens` belong to that owner, later groups to the next; the last
    entry is the current owner.
    """

    def __init__(self, handle: int, layout: PageFormat, layers: int, heads: int, writer: Writer) -> None:
        self.handle, self.layout, self.layers, self.heads = handle, layout, layers, heads
        self.lengths: I64 = np.zeros(layers, np.int64)
        self.maps: dict[str, GroupMap] = maps_of(layout, layers, heads)
        self.primary = {name: mapped for name, mapped in self.maps.items() if isinstance(mapped, PrimaryMap)}
        self.holding = {"v": self.primary["k"]} | self.primary if layout.latent else self.primary  # by source
        self.newest = -1
        self.owners: list[list[tuple[int, int]]] = [[] for _ in range(layers)]
        self.writer = writer
        self.failed = False  # has lost data: can only be freed
        self.names: dict[bytes, int] = {}  # key -> length of the prefix in tokens, or of the value in bytes
        self.label = 0  # caller-defined number: the tenant
        self.v_sums: F32 | None = None  # (layers, H, d) sum of V; None if it is not kept
        self.kept: KeptSequence | None = None  # its layout is not loaded: `lengths` and `maps` are empty

    @property
    def copies(self) -> list[GroupMap]:
        """Maps that are not primary."""
        return [mapped for mapped in self.maps.values() if not mapped.primary]

    def rows(self, banks: tuple[U16, U16], source: str, layer: int, tokens: range) -> U16:
        """Rows (tokens, H, d) of K or V as stored; (tokens, H, 2 d) of both."""
        parts = [self.holding[name].rows(banks, layer, tokens) for name in source]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)

    def stored_in(self, source: str, layer: int, tokens: range) -> U32:
        """Slots (streams, groups) of the pages that hold these rows."""
        holders = dict.fromkeys(self.holding[name].holder for name in source)
        ends = [(holder, tokens.start // holder.per_group, -(-tokens.stop // holder.per_group)) for holder in holders]
        return np.concatenate([each.slots[layer, :, first:last] for each, first, last in ends])

    @property
    def all_owners(self) -> set[int]:
        return {owner for chain in self.owners for owner, _ in chain} | {self.newest}

    def owner_of(self, layer: int, per_group: int, group: int) -> int:
        """Owner of a full group."""
        return next(owner for owner, tokens in self.owners[layer] if tokens < 0 or group < tokens // per_group)

    def owners_of(self, layer: int, per_group: int, groups: int) -> I64:
        """Owners (groups,) of the first `groups` full groups."""
        chain = self.owners[layer]
        ends = [groups if tokens < 0 else tokens // per_group for _, tokens in chain]
        assert not groups or ends[-1] >= groups, f"layer {layer}: full groups without an owner"
        which = np.searchsorted(ends, np.arange(groups), side="right")
        owners: I64 = np.array([owner for owner, _ in chain], np.int64)[which]
        return owners

    def write_as(self, layer: int, owner: int, tokens: int) -> None:
        """Keep the owners of groups that are full within `tokens`; `owner` writes all later groups."""
        chain = [(old, tokens if kept < 0 else min(kept, tokens)) for old, kept in self.owners[layer]]
        sizes = {mapped.per_group for mapped in self.maps.values()}  # sizes need not divide each other
        pruned: list[tuple[int, int]] = []
        for old, kept in chain:
            before = pruned[-1][1] if pruned else 0
            if any(kept // size > before // size for size in sizes):
                pruned.append((old, kept))
        assert all(a < b for (_, a), (_, b) in pairwise(pruned)), f"layer {layer}: {pruned} are not ascending"
        self.owners[layer] = [*pruned, (owner, -1)]

    def check_layer(self, layer: int) -> None:
        """Assert that full groups in flash and an open group in drive DRAM hold exactly a layer's tokens."""
        for name, mapped in self.primary.items():
            full, position = divmod(int(self.lengths[layer]), mapped.per_group)
            assert mapped.buffered(layer) == (position > 0), (
                f"sequence {self.handle}, layer {layer}: open group of {name}"
            )
            slots = mapped.holder.slots[layer, 0]
            ends = in_flash(slots[max(0, full - 1) : full + 1])
            assert not full or ends[0], f"sequence {self.handle}, layer {layer}: a full group of {name} has no page"
            assert not ends[full > 0 :].any(), f"sequence {self.handle}, layer {layer}: pages after the end of {name}"

    def expect(self, tokens: int) -> None:
        """Tell the writer to expect `tokens` tokens in every layer, so that it opens extents of a suitable width."""
        stored = (mapped for mapped in self.maps.values() if mapped.programmed)
        groups = sum(m.streams * (tokens // m.per_group - self.lengths // m.per_group).clip(0).sum() for m in stored)
        self.writer.expected_pages = max(self.writer.expected_pages, self.writer.written + int(groups))
