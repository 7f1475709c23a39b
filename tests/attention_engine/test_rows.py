"""Vector arithmetic on rows against float64.

partner of: attention_engine/_exp.py
"""

import numpy as np
import pytest
from numba import njit

from attention_engine._exp import exp, exponentials, largest
from attention_engine._rows import WIDTH, add_many, add_scaled, dot, dots_into


@njit
def _exp(x, out):
    for i in range(x.size):
        out[i] = exp(x[i])


@njit
def _exponentials(x, top):
    return exponentials(np.uint64(x.ctypes.data), x.size, top)


@njit
def _largest(x):
    return largest(np.uint64(x.ctypes.data), x.size)


@njit
def _dots(query, rows):
    at, size = np.uint64(rows.ctypes.data), np.uint64(2 * rows.shape[1])
    one = np.uint64(query.ctypes.data)
    return dot(one, at, rows.shape[1]), dot(one, at + size, rows.shape[1])


@njit
def _add(sums, weights, rows):
    at, size = np.uint64(rows.ctypes.data), np.uint64(2 * rows.shape[1])
    add_scaled(np.uint64(sums.ctypes.data), (weights[0], weights[1]), (at, at + size), rows.shape[1])


@njit
def _dots_into(out, queries, rows, scale):
    q, stride = np.uint64(queries.ctypes.data), np.uint64(4 * queries.shape[1])
    o, to = np.uint64(out.ctypes.data), np.uint64(4 * out.shape[1])
    at, size = np.uint64(rows.ctypes.data), np.uint64(2 * rows.shape[1])
    dots_into((o, o + to), scale, (q, q + stride), (at, at + size), rows.shape[1])


@njit
def _add_many(sums, weights, rows, order):
    at, size = np.uint64(rows.ctypes.data), np.uint64(2 * rows.shape[1])
    places = np.array([at + np.uint64(row) * size for row in order])
    s, stride = np.uint64(sums.ctypes.data), np.uint64(4 * sums.shape[1])
    w, to = np.uint64(weights.ctypes.data), np.uint64(4 * weights.shape[1])
    add_many((s, s + stride), (w, w + to), np.uint64(places.ctypes.data), order.size, rows.shape[1])


def test_exp_is_within_two_units_in_the_last_place():
    x = np.concatenate([-np.geomspace(1e-8, 86.9, 100_000), np.linspace(-86.9, 0, 100_000)]).astype(np.float32)
    x = x[: x.size // WIDTH * WIDTH]
    expected, out = np.exp(x.astype(np.float64)), np.empty_like(x)
    _exp(x, out)
    assert (np.abs(out - expected) / np.spacing(expected.astype(np.float32))).max() <= 2
    several = x.copy()
    assert _exponentials(several, np.float32(0)) == pytest.approx(expected.sum(), rel=1e-5)
    np.testing.assert_array_equal(several, out)


def test_exp_underflow_is_zero():
    x = np.array([-87.5, -1e4, -3e38, -np.inf], np.float32)
    out = np.ones_like(x)
    _exp(x, out)
    np.testing.assert_array_equal(out, 0)


def test_largest_ignores_nan():
    x = np.full(2 * WIDTH, np.nan, np.float32)
    x[[3, 20]] = -7, -5
    assert _largest(x) == -5


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 80, 128, 131])
def test_rows_of_any_length(count):
    generator = np.random.default_rng(count)
    query, sums = generator.standard_normal((2, count), np.float32)
    rows, weights = generator.standard_normal((2, count)).astype(np.float16), np.array([0.5, -2], np.float32)
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(_dots(query, rows.view(np.uint16)), exact @ query, rtol=1e-5, atol=1e-5)
    expected = sums + weights.astype(np.float64) @ exact
    _add(sums, weights, rows.view(np.uint16))
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 15, 16, 33, 64, 80, 128, 131])
def test_rows_in_batch_equal_rows_alone(count):
    generator = np.random.default_rng(count)
    queries, sums = generator.standard_normal((2, 2, count), np.float32)
    rows, scale = generator.standard_normal((6, count)).astype(np.float16).view(np.uint16), np.float32(0.125)
    out = np.zeros((2, 3), np.float32)
    _dots_into(out, queries, rows[:2], scale)
    assert out.tolist() == [[*(float(scale * dot) for dot in _dots(query, rows[:2])), 0.0] for query in queries]
    order, weights = np.array([3, 0, 5, 1, 4]), generator.standard_normal((2, 5), np.float32)
    expected = sums.copy()
    for one, own in zip(expected, weights, strict=True):
        for row, weight in zip(order, own, strict=True):
            _add(one, np.array([weight, 0], np.float32), np.stack([rows[row], np.zeros_like(rows[row])]))
    _add_many(sums, weights, rows, order)
    np.testing.assert_array_equal(sums, expected)
