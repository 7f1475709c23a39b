"""Progressive precision: K and V in few bits for all tokens, both in 8 bits a group together, their rows if wanted."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from csd_spec import PageForm
from csd_spec.arrays import I64, U8, U16
from csd_spec.progressive import Progressive
from csd_spec.view import in_flash
from ftl.flash.tag import Kind
from ftl.kv.layouts.coarse import begin_scores, put_scores, put_values
from ftl.kv.layouts.codes import refine, refined
from ftl.kv.layouts.group_map import POISON, GroupMap, PackedMap, PrimaryMap
from ftl.kv.layouts.lay import lay_rows
from ftl.kv.layouts.token import RowMap, TokenMap

OWN_RANGE = 32  # rows from which a group that is not full has ranges of its own, and not those of the group before


def _form(layout: PageForm) -> Progressive:
    assert layout.progressive is not None, f"layout {layout.layout.name} has no progressive precision"
    return layout.progressive


class RefinedMap(PackedMap):
    """K and V of n tokens in 8 bits, a page, or K of which V is a part. Rows wait with those who hold them."""

    primary, scattered = False, True

    def __init__(self, layout: PageForm, layers: int, heads: int) -> None:
        self.form = _form(layout)
        self.per_group, self.streams, self.source = layout.n, heads, "kv"[: self.form.parts]
        super().__init__(Kind.REFINED, layout, layers, heads)

    @property
    def group_bytes(self) -> int:
        return self.form.refined_bytes

    def waits_in(self, group: int) -> bool:
        return False

    def pack(self, rows: U16) -> U16:
        by_group = rows.transpose(1, 0, 2).reshape(-1, self.per_group, rows.shape[2])
        pages = np.zeros((by_group.shape[0], self.group_bytes + self.group_bytes % 2), np.uint8)
        refine(pages, self.form, by_group)
        return pages.view(np.uint16).reshape(self.streams, -1, pages.shape[1] // 2)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        raise AssertionError("its rows wait with K and V")

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        raise AssertionError("its rows wait with K and V")


class CoarseMap(PackedMap):
    """K or V in few bits, in pages of m channels. A group is packed from rows when it is full."""

    primary, scattered, rebuilt = False, False, True

    def __init__(self, kind: int, source: str, per_group: int, layout: PageForm, heads: tuple[int, int]) -> None:
        self.form, self.source, self.per_group = _form(layout), source, per_group
        self.streams = heads[1] * layout.embedding_pages
        super().__init__(kind, layout, *heads)

    def _by_stream(self, rows: U16) -> U16:
        """Rows (t, H, d) as (streams, t, m), with 0 in channels that a last page does not have."""
        m, parts = self.form.m, self.layout.embedding_pages
        if spare := m * parts - self.layout.head_dim:
            rows = np.pad(rows, ((0, 0), (0, 0), (0, spare)))
        return rows.reshape(-1, self.streams, m).transpose(1, 0, 2)

    def pack(self, rows: U16) -> U16:
        by_group = np.ascontiguousarray(self._by_stream(rows)).reshape(-1, self.per_group, self.form.m)
        pages = np.zeros((by_group.shape[0], self.form.page_bytes), np.uint8)
        self.put(pages, 0, by_group)
        return pages.view(np.uint16).reshape(self.streams, -1, self.form.page_bytes // 2)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        pages = content.view(np.uint8)[buffers]
        self.put(pages, position, self._by_stream(rows))
        content.view(np.uint8)[buffers] = pages

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        """Nothing is to be forgotten: codes behind the last token are overwritten before they are read."""

    @abstractmethod
    def put(self, pages: U8, first: int, rows: U16) -> None:
        """Write rows (streams, t, m) as tokens `first` on into pages (streams, bytes)."""


class ScoreMap(CoarseMap):
    """K in few bits. A group under construction has the ranges of the one before; full, it gets its own."""

    def __init__(self, layout: PageForm, layers: int, heads: int) -> None:
        kind = Kind.SCORES + (_form(layout).v_bits == 4)
        super().__init__(kind, "k", layout.T, layout, (layers, heads))

    def waits_in(self, group: int) -> bool:
        """The first group has no ranges yet, and all of a sequence that short is attended."""
        return group > 0

    def begin(self, content: U16, buffers: I64, before: U16 | None) -> None:
        content[buffers] = 0
        if before is not None:
            header = self.form.header_bytes // 2
            content[buffers, :header] = before[:, :header]

    def put(self, pages: U8, first: int, rows: U16) -> None:
        if first == 0 and rows.shape[1] >= OWN_RANGE:
            begin_scores(pages, self.form, rows)
        put_scores(pages, self.form, first, rows)


class ValueMap(CoarseMap):
    """V in few bits, or K where V is a part of it."""

    def __init__(self, layout: PageForm, layers: int, heads: int) -> None:
        form = _form(layout)
        kind = Kind.VALUES + (form.v_bits == 4)
        super().__init__(kind, "k" if form.latent else "v", form.value_tokens, layout, (layers, heads))

    def begin(self, content: U16, buffers: I64, before: U16 | None) -> None:
        content[buffers] = 0

    def put(self, pages: U8, first: int, rows: U16) -> None:
        put_values(pages, self.form, first, rows)


class _Waiting(RowMap):
    """Rows of K or V of the unfinished group, as they came; those of full groups are as refined pages have them."""

    programmed = False

    def __init__(self, kind: int, source: str, layout: PageForm, heads: tuple[int, int], pages: RefinedMap) -> None:
        super().__init__(kind, source, layout, *heads)
        d, part = layout.head_dim, "kv".index(source)
        self._pages, self._part = pages, slice(part * d, (part + 1) * d)

    @property
    def holder(self) -> GroupMap:
        return self._pages

    def rows(self, banks: tuple[U16, U16], layer: int, tokens: range) -> U16:
        n, d = self.per_group, self.layout.head_dim
        first, last = tokens.start // n, -(-tokens.stop // n)
        slots = self._pages.slots[layer, :, first:last]
        full = int(in_flash(slots[0]).sum())
        pages = banks[0][slots[:, :full].ravel()].view(np.uint8)
        rows = refined(pages, self._pages.form)[..., self._part]
        stored = rows.reshape(self.heads, full * n, d).transpose(1, 0, 2)
        waiting = tokens.stop - (first + full) * n
        if waiting > 0:
            stored = np.concatenate([stored, self.waiting(banks[1], layer, waiting)])
        return np.ascontiguousarray(stored[tokens.start - first * n :][: len(tokens)])


class WaitingMap(_Waiting, TokenMap):
    """In one page buffer a head."""


class WaitingInMoreMap(_Waiting):
    """In several page buffers a head, a stream each: of K alone a refined page has more tokens than a buffer rows."""

    def __init__(self, kind: int, source: str, layout: PageForm, heads: tuple[int, int], pages: RefinedMap) -> None:
        super().__init__(kind, source, layout, heads, pages)
        self.form = _form(layout)
        self.streams *= self.form.buffers
        GroupMap.__init__(self, kind, layout, *heads)

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        buffer, row = divmod(position, self.form.waiting)
        lay_rows(pages, at.reshape(self.heads, -1)[:, buffer:], self.form.waiting, row, rows)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        self.write(content, buffers, position, rows)

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        for number, each in enumerate(buffers.reshape(self.heads, -1).T):
            first = max(0, position - number * self.form.waiting)
            content[each, first * self.layout.head_dim :] = POISON

    def waiting(self, content: U16, layer: int, count: int) -> U16:
        d = self.layout.head_dim
        rows = content[self.buffers[layer], : self.form.waiting * d].reshape(self.heads, -1, d)
        return rows[:, :count].transpose(1, 0, 2)


def staged(kind: int, source: str, form: PageForm, shape: tuple[int, int], pages: RefinedMap) -> PrimaryMap:
    """The map of rows of K or V, of shape (layers, heads), that wait until `pages` hold them."""
    return (WaitingMap if pages.form.buffers == 1 else WaitingInMoreMap)(kind, source, form, shape, pages)
