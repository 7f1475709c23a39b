"""Tag in a page's spare area: identifies what the page holds. This module defines its bit layout.

| kind (5 bits) | the other 59 bits |
|---|---|
| KV groups: every kind but the next two | owner 17, layer 8, stream 14, group 20 |
| JOURNAL | copy (0 or 1) 1, record 28, page index 15, page count 15 |
| BLOCK | logical page 32 |

A group's tag is written once: an owner never programs the same group of a layer twice, so all intact pages with the
same tag hold the same data.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from csd_spec.arrays import I64, U64

KINDS, MAX_OWNERS, MAX_LAYERS, MAX_STREAMS, MAX_GROUPS = 1 << 5, 1 << 17, 1 << 8, 1 << 14, 1 << 20
MAX_RECORDS, MAX_RECORD_PAGES, MAX_LOGICAL_PAGES = 1 << 28, 1 << 15, 1 << 32
_KIND, _OWNER, _LAYER, _STREAM, _GROUP = 59, 42, 34, 20, 0  # lowest bit of each field
_PLACE, _RECORD, _RECORD_PAGE = 58, 30, 15


class PageKind(IntEnum):
    """Content of a page. Layouts use the free numbers; each page format needs its own kind."""

    K = 1
    V = 2
    JOURNAL = 3
    BLOCK = 4
    VALUES = 5  # and 6: by bit width
    EMBEDDING_K = 8  # to 19: by bit width and channels per page, so that a relayout gets new tags
    REFINED = 20
    SCORES = 21  # and 22: by bit width
    FREE = 24  # to 31: for future layouts


def _field(tags: U64, shift: int, size: int) -> I64:
    wide: I64 = (tags.astype(np.uint64) >> np.uint64(shift) & np.uint64(size - 1)).astype(np.int64)
    return wide


def kinds(tags: U64) -> I64:
    """Kind of each tag."""
    return _field(tags, _KIND, KINDS)


def of_kind(tags: U64, kind: int) -> slice:
    """Slice of the tags of a kind in an ascending array."""
    first, last = np.uint64(kind << _KIND), np.uint64((kind + 1 << _KIND) - 1)
    return slice(int(np.searchsorted(tags, first)), int(np.searchsorted(tags, last, "right")))


def group_tags(kind: int, owner: int, layer: int, streams: int, groups: I64) -> U64:
    """Tags of `groups` of every stream of a layer, (streams, groups)."""
    assert kind not in (PageKind.JOURNAL, PageKind.BLOCK) and 0 < kind < KINDS, f"kind {kind} is no group's"
    assert owner < MAX_OWNERS and layer < MAX_LAYERS and streams <= MAX_STREAMS
    stream = np.arange(streams, dtype=np.uint64)[:, None] << np.uint64(_STREAM)
    head = np.uint64(kind << _KIND | owner << _OWNER | layer << _LAYER)
    tags: U64 = head | stream | groups.astype(np.uint64)[None, :]
    return tags


def owners(tags: U64) -> I64:
    """Owner of each group."""
    return _field(tags, _OWNER, MAX_OWNERS)


def group_places(tags: U64) -> tuple[I64, I64, I64]:
    """Layer, stream and group of each tag."""
    return _field(tags, _LAYER, MAX_LAYERS), _field(tags, _STREAM, MAX_STREAMS), _field(tags, _GROUP, MAX_GROUPS)


def is_group(tags: U64) -> NDArray[np.bool_]:
    """Whether each tag is that of a KV group."""
    kind = kinds(tags)
    groups: NDArray[np.bool_] = (kind != PageKind.JOURNAL) & (kind != PageKind.BLOCK)
    return groups


def record_tags(number: int, place: int, count: int) -> U64:
    """Tags of the `count` pages of one copy (`place`) of a journal record; record numbers wrap around."""
    index = np.arange(count)
    head = np.uint64(int(PageKind.JOURNAL) << _KIND | place << _PLACE | number % MAX_RECORDS << _RECORD | count)
    tags: U64 = head | index.astype(np.uint64) << np.uint64(_RECORD_PAGE)
    return tags


def record_fields(tags: U64) -> tuple[I64, I64, I64, I64]:
    """Record number, copy, page index, and page count of each tag."""
    number, pages = _field(tags, _RECORD, MAX_RECORDS), MAX_RECORD_PAGES
    return number, _field(tags, _PLACE, 2), _field(tags, _RECORD_PAGE, pages), _field(tags, 0, pages)


def block_tags(lpns: I64) -> U64:
    """Tags of logical pages of the block namespace."""
    tags: U64 = np.uint64(int(PageKind.BLOCK) << _KIND) | lpns.astype(np.uint64)
    return tags


def logical_pages(tags: U64) -> I64:
    """Logical page of each tag."""
    return _field(tags, 0, MAX_LOGICAL_PAGES)
