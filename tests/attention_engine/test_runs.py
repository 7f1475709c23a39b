"""Runs of rows: dot products and weighted sums of codes, for several queries at once.

partner of: attention_engine/_runs.py
"""

import numpy as np
import pytest
from numba import njit

from attention_engine._runs import add_code_run, dot_codes, powers_of

at = njit(lambda array: np.uint64(array.ctypes.data))


@njit
def four_dots(q, row):
    a, stride, d = at(q), np.uint64(q.shape[1] * 4), q.shape[1]
    four = a, a + stride, a + np.uint64(2) * stride, a + np.uint64(3) * stride
    return dot_codes(four, at(row), d)


@njit
def one_dot(q, row):
    return dot_codes((at(q),), at(row), q.size)[0]


@njit
def add_run(sums, weights, rows, scales):
    s, w, d = at(sums), at(weights), sums.shape[1]
    to, by = (s, s + np.uint64(4 * d)), (w, w + np.uint64(4 * weights.shape[1]))
    add_code_run(to, by, at(rows), rows.shape[0], at(scales), d)


@njit
def raise_all(exponents, out):
    powers_of(at(out), at(exponents), out.size)


def some_codes(generator, shape):
    return generator.integers(-127, 128, shape).astype(np.int8)


@pytest.mark.parametrize("d", [8, 16, 40, 64, 80, 128, 250])
def test_four_query_dots_equal_single_dots(d):
    generator = np.random.default_rng(d)
    q, row = generator.standard_normal((4, d)).astype(np.float32), some_codes(generator, d)
    got = np.array(four_dots(q, row), np.float32)
    np.testing.assert_array_equal(got, np.array([one_dot(query, row) for query in q], np.float32))
    exact, size = q.astype(np.float64) @ row.astype(np.float64), np.abs(q) @ np.abs(row.astype(np.float64))
    assert (np.abs(got - exact) <= 1e-6 * size).all()


@pytest.mark.parametrize(("d", "count"), [(8, 5), (64, 31), (80, 1), (128, 15), (250, 3)])
def test_a_run_is_added_with_its_weights_and_scales(d, count):
    generator = np.random.default_rng(d)
    sums, weights = (generator.standard_normal((2, n)).astype(np.float32) for n in (d, 32))
    rows, scales = some_codes(generator, (count, d)), np.exp2(generator.integers(-8, 3, d)).astype(np.float32)
    expected = sums + (weights[:, :count].astype(np.float64) @ rows.astype(np.float64)) * scales
    size = np.abs(sums) + np.abs(weights[:, :count]) @ np.abs(rows.astype(np.float64)) * scales
    add_run(sums, weights, rows, scales)
    assert (np.abs(sums - expected) <= 1e-6 * size).all()


@pytest.mark.parametrize("d", [8, 34, 64])
def test_powers_are_exact(d):
    exponents, out = np.resize(np.arange(-24, 10), d).astype(np.int8), np.empty(d, np.float32)
    raise_all(exponents, out)
    np.testing.assert_array_equal(out, np.exp2(exponents.astype(np.float64)))
