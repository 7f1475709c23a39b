"""Values and pages that tests of low-bit layouts start from."""

from __future__ import annotations

import numpy as np

from csd_spec.progressive import Progressive
from ftl.kv.layouts.coarse import begin_scores, put_scores, put_values
from ftl.kv.layouts.codes import MAX_BRAIN, to_fp32

BITS = {2: (2.5, 2), 4: (4.0, 4)}  # bits of K and V, by bits of V


def any_values(seed, *shape, bf16=False):
    """Values of all sizes: random bits, or one of them a hundred times larger than the others, or hardly any."""
    generator = np.random.default_rng(seed)
    if bf16:
        bits = generator.integers(0, 1 << 16, shape, np.uint16)
        few = generator.standard_normal(shape) * 10.0 ** generator.integers(-30, 30) + generator.integers(0, 9)
        few = (few.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.where((bits & 0x7FFF) < 0x7F80, bits, 0xFF7F).astype(np.uint16) if seed % 3 else few
    values = generator.integers(0, 1 << 16, shape, np.uint16).view(np.float16)
    values = np.where(np.isfinite(values), values, np.float16(-65504))
    few = generator.standard_normal(shape) * 10.0 ** generator.integers(-8, 3)
    return (values if seed % 3 else few).astype(np.float16).view(np.uint16)


def as_bits(values, bf16):
    """FP16, or BF16 cut to its 16 bits."""
    if bf16:
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values).astype(np.float16).view(np.uint16)


def values_of(bits, bf16):
    """Values in float64; BF16 values beyond 2^127 count as nearly that."""
    return np.clip(to_fp32(bits, bf16).astype(np.float64), -MAX_BRAIN, MAX_BRAIN)


def form_of(d, v_bits=2, bf16=False, page_bytes=4096):
    """The form of a page of d channels."""
    return Progressive(page_bytes, d, *BITS[v_bits], d, bf16)


def score_page(bits, form):
    """A score page of rows (t, m)."""
    pages = np.empty((1, form.page_bytes), np.uint8)
    begin_scores(pages, form, bits[None])
    put_scores(pages, form, 0, bits[None])
    return pages


def value_page(bits, form):
    """A value page of rows (t, m)."""
    pages = np.zeros((1, form.page_bytes), np.uint8)
    put_values(pages, form, 0, bits[None])
    return pages
