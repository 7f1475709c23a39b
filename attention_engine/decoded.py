"""Views of pages whose codec has no compiled loops: pages are decoded to scratch, which the kernels then read.

Only pages of a selection are decoded: no others have been fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_spec import LAYOUTS, KvView
from csd_spec.arrays import I32, I64, U16, U32
from csd_spec.model import FP16_BYTES
from csd_spec.view import UNMAPPED, gather_pages


def has_loops(view: KvView) -> bool:
    """Whether the kernels read rows of a view as they are stored."""
    return view.layout.rows.tag is not None


def with_tokens(view: KvView, tokens: I32, counts: I64) -> KvView:
    """A view whose pages of K and V are decoded.

    Args:
        view: Slots of N streams.
        tokens: Tokens that will be read, (N, k); the first counts[n] of row n are valid.
        counts: Valid tokens per stream, (N,).
    """
    wanted = _groups_of(view, (row[:count] for row, count in zip(tokens, counts, strict=True)))
    n, d = view.layout.n, view.layout.head_dim
    k, v = (_decoded(view, slots[wanted], n, d) for slots in (view.k_slots, view.v_slots))
    scratch = _on_scratch(view, k, v)
    return replace(scratch, k_slots=_numbered(wanted, 0), v_slots=_numbered(wanted, len(k)))


def with_channels(view: KvView, channels: I32) -> KvView:
    """A view whose copy of K is decoded, and K itself for groups without pages of that copy.

    Args:
        view: Slots of N streams.
        channels: Channels that will be read, (N, r).
    """
    form, streams = view.layout, len(channels)
    copied = view.e_slots != UNMAPPED
    parts = np.zeros(view.e_slots.shape[:2], bool)
    parts[np.arange(streams)[:, None], channels // form.m] = True
    wanted = copied & parts[:, :, None]
    e_slots = _numbered(wanted, 0)
    e_slots[copied & ~wanted] = 0  # not read: but kernels see by a group's first page whether it has any
    lengths = enumerate(view.seq_lens.tolist())
    rest = _groups_of(view, (np.flatnonzero(~copied[n, 0, np.arange(tokens) // form.T]) for n, tokens in lengths))
    runs = _decoded(view, view.e_slots[wanted], form.m, form.T)
    rows = _decoded(view, view.k_slots[rest], form.n, form.head_dim)
    return replace(_on_scratch(view, runs, rows), e_slots=e_slots, k_slots=_numbered(rest, len(runs)))


def _groups_of(view: KvView, tokens: Iterable[NDArray[Any]]) -> NDArray[np.bool_]:
    """Token groups (N, groups) that hold tokens of each stream."""
    groups = np.zeros(view.k_slots.shape, bool)
    for mine, each in zip(groups, tokens, strict=True):
        mine[each // view.layout.n] = True
    return groups


def _decoded(view: KvView, slots: U32, vectors: int, values: int) -> U16:
    """Pages (P, vectors x values) of slots (P,), which hold encoded vectors."""
    codec = view.layout.rows
    size = codec.row_bytes(values)
    encoded = gather_pages(view.banks, slots, vectors * size).reshape(-1, vectors, size)
    return codec.decode(encoded, values).reshape(-1, vectors * values)


def _numbered(wanted: NDArray[np.bool_], first: int) -> U32:
    """Slots that count the pages that are wanted, in order."""
    slots = np.full(wanted.shape, UNMAPPED)
    slots[wanted] = np.arange(first, first + np.count_nonzero(wanted))
    return slots


def _on_scratch(view: KvView, first: U16, second: U16) -> KvView:
    """A view of two kinds of decoded pages that follow each other in one scratch bank."""
    pages = np.empty((len(first) + len(second), max(first.shape[1], second.shape[1])), np.uint16)
    pages[: len(first), : first.shape[1]] = first
    pages[len(first) :, : second.shape[1]] = second
    form = view.layout
    plain = replace(
        form,
        layout=LAYOUTS[form.rows.value],
        row_bytes=FP16_BYTES * form.head_dim,
        run_bytes=FP16_BYTES * form.T,
    )
    return replace(view, layout=plain, banks=(pages, pages), kept={})
