"""Progressive precision: K in few bits for all tokens, K and V in 8 bits a group together, their rows if wanted."""

from __future__ import annotations

import numpy as np

from csd_spec import PageForm
from csd_spec.arrays import I64, U8, U16
from csd_spec.planes import Planes
from csd_spec.view import in_flash
from ftl.flash.tag import Kind
from ftl.kv.layouts.codes import begin_scores, forget_scores, put_scores, refine, refined
from ftl.kv.layouts.group_map import POISON, GroupMap, PackedMap, PrimaryMap
from ftl.kv.layouts.lay import lay_rows
from ftl.kv.layouts.token import RowMap, TokenMap

OWN_RANGE = 32  # rows from which a group that is not full has ranges of its own, and not those of the group before


def _form(layout: PageForm) -> Planes:
    assert layout.planes is not None, f"layout {layout.layout.name} has no planes"
    return layout.planes


class RefinedMap(PackedMap):
    """K and V of n tokens in 8 bits, a page, or K of which V is a part. Rows wait with those who hold them."""

    primary, scattered = False, True

    def __init__(self, layout: PageForm, layers: int, heads: int) -> None:
        self.form = _form(layout)
        self.per_group, self.streams, self.source = layout.n, heads, "kv"[: self.form.parts]
        super().__init__(Kind.REFINED, layout, layers, heads)

    @property
    def group_bytes(self) -> int:
        return self.form.parts * self.layout.head_dim * (self.layout.n + 1)

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


class ScoreMap(PackedMap):
    """K in few bits. A group under construction has the ranges of the one before; full, it gets its own."""

    source, primary, scattered, rebuilt = "k", False, False, True

    def __init__(self, layout: PageForm, layers: int, heads: int) -> None:
        self.form = _form(layout)
        self.per_group, self.streams = layout.T, heads * layout.embedding_pages
        super().__init__(Kind.SCORES + self.form.bits - 2, layout, layers, heads)

    def waits_in(self, group: int) -> bool:
        """The first group has no ranges yet, and all of a sequence that short is attended."""
        return group > 0

    def _by_stream(self, rows: U16) -> U16:
        """Rows (t, H, d) as (streams, t, m), with 0 in channels that a last page does not have."""
        m, parts = self.form.m, self.layout.embedding_pages
        if spare := m * parts - self.layout.head_dim:
            rows = np.pad(rows, ((0, 0), (0, 0), (0, spare)))
        return rows.reshape(-1, self.streams, m).transpose(1, 0, 2)

    def pack(self, rows: U16) -> U16:
        form = self.form
        by_group = np.ascontiguousarray(self._by_stream(rows)).reshape(-1, form.T, form.m)
        pages = np.empty((by_group.shape[0], form.page_bytes), np.uint8)
        begin_scores(pages, form, by_group)
        put_scores(pages, form, 0, by_group)
        return pages.view(np.uint16).reshape(self.streams, -1, form.page_bytes // 2)

    def begin(self, content: U16, buffers: I64, before: U16 | None) -> None:
        content[buffers] = 0
        if before is not None:
            header = -(-self.form.header_bytes // 2)
            content[buffers, :header] = before[:, :header]
            content.view(np.uint8)[buffers, self.form.header_bytes : 2 * header] = 0

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        pages, by_stream = content.view(np.uint8)[buffers], self._by_stream(rows)
        if position == 0 and rows.shape[0] >= OWN_RANGE:
            begin_scores(pages, self.form, by_stream)
        put_scores(pages, self.form, position, by_stream)
        content.view(np.uint8)[buffers] = pages

    def poison(self, content: U16, buffers: I64, position: int) -> None:
        pages: U8 = content.view(np.uint8)[buffers]
        forget_scores(pages, self.form, position)
        content.view(np.uint8)[buffers] = pages


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
