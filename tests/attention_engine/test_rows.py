"""Vector arithmetic on rows against float64."""

import numpy as np
import pytest
from numba import njit

from attention_engine._rows import WIDTH, add_scaled, dots, exp, exponentials, largest


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
    return dots((one,), (at, at + size), rows.shape[1])


@njit
def _eight_dots(queries, rows):
    q, each = np.uint64(queries.ctypes.data), np.uint64(4 * queries.shape[1])
    at, size = np.uint64(rows.ctypes.data), np.uint64(2 * rows.shape[1])
    return dots((q, q + each), (at, at + size, at + np.uint64(2) * size, at + np.uint64(3) * size), rows.shape[1])


@njit
def _add_both(sums, weights, rows):
    s, each = np.uint64(sums.ctypes.data), np.uint64(4 * sums.shape[1])
    at, size, (w, x) = np.uint64(rows.ctypes.data), np.uint64(2 * rows.shape[1]), weights
    add_scaled((s, s + each), (w[0], w[1], x[0], x[1]), (at, at + size), rows.shape[1])


@njit
def _add(sums, weights, rows):
    at, size = np.uint64(rows.ctypes.data), np.uint64(2 * rows.shape[1])
    add_scaled((np.uint64(sums.ctypes.data),), (weights[0], weights[1]), (at, at + size), rows.shape[1])


def test_exp_is_within_two_units_in_the_last_place():
    x = np.concatenate([-np.geomspace(1e-8, 86.9, 100_000), np.linspace(-86.9, 0, 100_000)]).astype(np.float32)
    x = x[: x.size // WIDTH * WIDTH]
    expected, out = np.exp(x.astype(np.float64)), np.empty_like(x)
    _exp(x, out)
    assert (np.abs(out - expected) / np.spacing(expected.astype(np.float32))).max() <= 2
    several = x.copy()
    assert _exponentials(several, np.float32(0)) == pytest.approx(expected.sum(), rel=1e-5)
    np.testing.assert_array_equal(several, out)


def test_exp_of_what_vanishes_is_zero():
    x = np.array([-87.5, -1e4, -3e38, -np.inf], np.float32)
    out = np.ones_like(x)
    _exp(x, out)
    np.testing.assert_array_equal(out, 0)


def test_largest_leaves_nan_out():
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


@pytest.mark.parametrize("count", [1, 16, 33, 80, 128])
def test_two_queries_get_the_bits_that_one_gets(count):
    generator = np.random.default_rng(count)
    queries, sums = generator.standard_normal((2, 2, count), np.float32)
    rows, weights = (
        generator.standard_normal((4, count)).astype(np.float16).view(np.uint16),
        np.float32([[2, 3], [5, 7]]),
    )
    alone = [_dots(query, some)[i] for query in queries for some in (rows[:2], rows[2:]) for i in range(2)]
    assert list(_eight_dots(queries, rows)) == alone
    expected = sums.copy()
    for one, w in zip(expected, weights, strict=True):
        _add(one, w, rows[:2])
    _add_both(sums, (weights[0], weights[1]), rows[:2])
    np.testing.assert_array_equal(sums, expected)
