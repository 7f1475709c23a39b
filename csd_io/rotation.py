"""Rotation of rows of V in progressive-precision pages (`csd_spec.progressive`), and its inverse."""

from __future__ import annotations

import math

import numpy as np

from csd_io.compiled import njit
from csd_spec.progressive import SIGNS


@njit(cache=True, nogil=True)
def butterflies(values):  # type: ignore[no-untyped-def]
    """Multiply values (m,) in place by orthonormal Hadamard matrices of the largest power of two that divides m."""
    m = values.size
    block, step = m & -m, 1
    while step < block:
        for first in range(0, m, 2 * step):
            for i in range(first, first + step):
                a, b = values[i], values[i + step]
                values[i], values[i + step] = a + b, a - b
        step *= 2
    scale = np.float32(1 / math.sqrt(block))
    for i in range(m):
        values[i] *= scale


@njit(cache=True, nogil=True)
def _turn_signs(values):  # type: ignore[no-untyped-def]
    """Flip the signs of the channels in `SIGNS`."""
    for i in range(values.size):
        if SIGNS >> np.uint64(i % 64) & np.uint64(1):
            values[i] = -values[i]


@njit(cache=True, nogil=True)
def rotate(values):  # type: ignore[no-untyped-def]
    """Rotate values (m,) in place: signs, then Hadamard matrices."""
    _turn_signs(values)
    butterflies(values)


@njit(cache=True, nogil=True)
def rotate_back(values):  # type: ignore[no-untyped-def]
    """Inverse of `rotate`."""
    butterflies(values)
    _turn_signs(values)
