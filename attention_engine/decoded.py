"""Views of pages whose codec has no compiled kernels: the pages are decoded to scratch memory for the kernels.

Only pages of a selection are decoded, because only these pages were fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_spec import LAYOUTS, KvSlotView
from csd_spec.arrays import I32, I64, U16, U32
from csd_spec.model import FP16_BYTES
from csd_spec.view import UNMAPPED, gather_pages


def has_loops(view: KvSlotView) -> bool:
    """Return whether the kernels can read the stored rows of a view without decoding."""
    return view.layout.rows.tag is not None


def with_tokens(view: KvSlotView, tokens: I32, counts: I64) -> KvSlotView:
    """Return a view with decoded pages of keys and values.

    Args:
        view: Slots of N streams.
        tokens: Tokens to read, (N, k); the first counts[n] of row n are valid.
        counts: Valid tokens of each stream, (N,).
    """
    wanted = _groups_of(view, (row[:count] for row, count in zip(tokens, counts, strict=True)))
    n, d = view.layout.n, view.layout.head_dim
    k, v = (_decoded(view, slots[wanted], n, d) for slots in (view.k_slots, view.v_slots))
    scratch = _on_scratch(view, k, v)
    return replace(scratch, k_slots=_numbered(wanted, 0), v_slots=_numbered(wanted, len(k)))


def with_channels(view: KvSlotView, channels: I32) -> KvSlotView:
    """Return a view with a decoded copy of K, and with decoded K for groups that have no pages of the copy.

    Args:
        view: Slots of N streams.
        channels: Channels to read, (N, r).
    """
    form, streams = view.layout, len(channels)
    copied = view.e_slots != UNMAPPED
    parts = np.zeros(view.e_slots.shape[:2], bool)
    parts[np.arange(streams)[:, None], channels // form.m] = True
    wanted = copied & parts[:, :, None]
    e_slots = _numbered(wanted, 0)
    e_slots[copied & ~wanted] = 0  # not read, but kernels use the first page of a group to detect its copy
    lengths = enumerate(view.seq_lens.tolist())
    rest = _groups_of(view, (np.flatnonzero(~copied[n, 0, np.arange(tokens) // form.T]) for n, tokens in lengths))
    runs = _decoded(view, view.e_slots[wanted], form.m, form.T)
    rows = _decoded(view, view.k_slots[rest], form.n, form.head_dim)
    return replace(_on_scratch(view, runs, rows), e_slots=e_slots, k_slots=_numbered(rest, len(runs)))


def _groups_of(view: KvSlotView, tokens: Iterable[NDArray[Any]]) -> NDArray[np.bool_]:
    """Return the token groups (N, groups) that contain the tokens of each stream."""
    groups = np.zeros(view.k_slots.shape, bool)
    for group, token in zip(groups, tokens, strict=True):
        group[token // view.layout.n] = True
    return groups


def _decoded(view: KvSlotView, slots: U32, vectors: int, values: int) -> U16:
    """Return decoded pages (P, vectors x values) of slots (P,) with encoded vectors."""
    codec = view.layout.rows
    size = codec.row_bytes(values)
    encoded = gather_pages(view.banks, slots, vectors * size).reshape(-1, vectors, size)
    return codec.decode(encoded, values).reshape(-1, vectors * values)


def _numbered(wanted: NDArray[np.bool_], first: int) -> U32:
    """Return slots with consecutive numbers for the wanted pages."""
    slots = np.full(wanted.shape, UNMAPPED)
    slots[wanted] = np.arange(first, first + np.count_nonzero(wanted))
    return slots


def _on_scratch(view: KvSlotView, first: U16, second: U16) -> KvSlotView:
    """Return a view of two types of decoded pages in one scratch bank, one after the other."""
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
