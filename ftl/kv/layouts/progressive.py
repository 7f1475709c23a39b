"""Progressive precision: low-bit keys and values of all tokens, INT8 rows per group, and optionally exact rows."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from csd_spec import PageFormat
from csd_spec.arrays import I64, U8, U16
from csd_spec.progressive import Progressive
from csd_spec.view import in_flash
from ftl.flash.tag import PageKind
from ftl.kv.layouts.coarse import begin_scores, put_scores, put_values
from ftl.kv.layouts.codes import refine, refined
from ftl.kv.layouts.group_map import POISON, GroupMap, PackedMap, PrimaryMap
from ftl.kv.layouts.packing import pack_rows
from ftl.kv.layouts.token import RowMap, TokenMap

OWN_RANGE = 32  # a partial group with at least this many rows gets its own ranges instead of the previous group's


def _form(layout: PageFormat) -> Progressive:
    assert layout.progressive is not None, f"layout {layout.layout.name} has no progressive precision"
    return layout.progressive


class RefinedMap(PackedMap):
    """INT8 keys and values of n tokens per page (only K if V is a part of it); primary maps buffer the rows."""

    primary, scattered = False, True

    def __init__(self, layout: PageFormat, layers: int, heads: int) -> None:
        self.form = _form(layout)
        self.per_group, self.streams, self.source = layout.n, heads, "kv"[: self.form.parts]
        super().__init__(PageKind.REFINED, layout, layers, heads)

    @property
    def group_bytes(self) -> int:
        return self.form.refined_bytes

    def can_buffer(self, group: int) -> bool:
        return False

    def pack(self, rows: U16) -> U16:
        by_group = rows.transpose(1, 0, 2).reshape(-1, self.per_group, rows.shape[2])
        pages = np.zeros((by_group.shape[0], self.group_bytes + self.group_bytes % 2), np.uint8)
        refine(pages, self.form, by_group)
        return pages.view(np.uint16).reshape(self.streams, -1, pages.shape[1] // 2)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        raise AssertionError("rows of an unfinished refined group are buffered by the primary maps")

    def fill_nan(self, content: U16, buffers: I64, position: int) -> None:
        raise AssertionError("rows of an unfinished refined group are buffered by the primary maps")


class CoarseMap(PackedMap):
    """Low-bit K or V in pages of m channels. A full group is packed again from its rows."""

    primary, scattered, rebuilt = False, False, True

    def __init__(self, kind: int, source: str, per_group: int, layout: PageFormat, heads: tuple[int, int]) -> None:
        self.form, self.source, self.per_group = _form(layout), source, per_group
        self.streams = heads[1] * layout.embedding_pages
        super().__init__(kind, layout, *heads)

    def _by_stream(self, rows: U16) -> U16:
        """Rows (t, H, d) as (streams, t, m); channels that the last page does not have are 0."""
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

    def fill_nan(self, content: U16, buffers: I64, position: int) -> None:
        """No-op: codes after the last token are overwritten before they are read."""

    @abstractmethod
    def put(self, pages: U8, first: int, rows: U16) -> None:
        """Write rows (streams, t, m) as tokens `first` on into pages (streams, bytes)."""


class ScoreMap(CoarseMap):
    """Low-bit K. An unfinished group uses the ranges of the previous one; a full group gets its own."""

    def __init__(self, layout: PageFormat, layers: int, heads: int) -> None:
        kind = PageKind.SCORES + (_form(layout).v_bits == 4)
        super().__init__(kind, "k", layout.T, layout, (layers, heads))

    def can_buffer(self, group: int) -> bool:
        """The first group has no ranges yet; all tokens of so short a sequence are attended."""
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
    """Low-bit V, or K if V is a part of it."""

    def __init__(self, layout: PageFormat, layers: int, heads: int) -> None:
        form = _form(layout)
        kind = PageKind.VALUES + (form.v_bits == 4)
        super().__init__(kind, "k" if form.latent else "v", form.value_tokens, layout, (layers, heads))

    def begin(self, content: U16, buffers: I64, before: U16 | None) -> None:
        content[buffers] = 0

    def put(self, pages: U8, first: int, rows: U16) -> None:
        put_values(pages, self.form, first, rows)


class _StagedRows(RowMap):
    """Exact rows of K or V of the unfinished group; full groups are read back from refined pages."""

    programmed = False

    def __init__(self, kind: int, source: str, layout: PageFormat, heads: tuple[int, int], pages: RefinedMap) -> None:
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
            stored = np.concatenate([stored, self.buffered_rows(banks[1], layer, waiting)])
        return np.ascontiguousarray(stored[tokens.start - first * n :][: len(tokens)])


class StagingMap(_StagedRows, TokenMap):
    """Stages rows in one page buffer per head."""


class MultiBufferStagingMap(_StagedRows):
    """Stages rows in several page buffers per head, one stream each.

    Without V, a refined page has more tokens than a buffer has rows.
    """

    def __init__(self, kind: int, source: str, layout: PageFormat, heads: tuple[int, int], pages: RefinedMap) -> None:
        super().__init__(kind, source, layout, heads, pages)
        self.form = _form(layout)
        self.streams *= self.form.buffers
        GroupMap.__init__(self, kind, layout, *heads)

    def write(self, pages: U16, at: I64, position: int, rows: U16) -> None:
        buffer, row = divmod(position, self.form.waiting)
        pack_rows(pages, at.reshape(self.heads, -1)[:, buffer:], self.form.waiting, row, rows)

    def fill(self, content: U16, buffers: I64, position: int, rows: U16) -> None:
        self.write(content, buffers, position, rows)

    def fill_nan(self, content: U16, buffers: I64, position: int) -> None:
        for number, of_heads in enumerate(buffers.reshape(self.heads, -1).T):
            first = max(0, position - number * self.form.waiting)
            content[of_heads, first * self.layout.head_dim :] = POISON

    def buffered_rows(self, content: U16, layer: int, count: int) -> U16:
        d = self.layout.head_dim
        rows = content[self.buffers[layer], : self.form.waiting * d].reshape(self.heads, -1, d)
        return rows[:, :count].transpose(1, 0, 2)


def staging_map(kind: int, source: str, form: PageFormat, shape: tuple[int, int], pages: RefinedMap) -> PrimaryMap:
    """Create the map that stages rows of K or V until `pages` hold them; shape is (layers, heads)."""
    return (StagingMap if pages.form.buffers == 1 else MultiBufferStagingMap)(kind, source, form, shape, pages)
