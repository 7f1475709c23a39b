"""Building blocks of quantizers, compared with published tables and plain loops."""

import numpy as np
import pytest

from vcsd_eval.accuracy.published.codes import (
    cluster_sums,
    hadamard,
    lloyd_max,
    nearest,
    packed_bytes,
    random_hadamard,
    random_orthogonal,
    sphere_codebook,
    uniform,
    uniform_in_groups,
)

# Max, Quantizing for minimum distortion (IRE Trans. IT, 1960), Table I: levels above 0 of N(0, 1)
MAX_1960 = {2: [0.7980], 4: [0.4528, 1.510], 8: [0.2451, 0.7560, 1.344, 2.152]}
# ParisKV's published codebook of |u_j| on the unit sphere in 8 dimensions
PARISKV = [0.042, 0.127, 0.213, 0.303, 0.397, 0.500, 0.617, 0.763]


@pytest.mark.parametrize("levels", MAX_1960)
def test_lloyd_max_of_normal_density_is_maxs_table(levels):
    x = np.linspace(-8, 8, 200_001)
    book = lloyd_max(x, np.exp(-x * x / 2), levels)
    np.testing.assert_allclose(book[levels // 2 :], MAX_1960[levels], atol=7e-4)
    np.testing.assert_allclose(book, -book[::-1], atol=1e-3)


def test_sphere_codebook_is_pariskvs():
    """Theirs is of random samples: the same to 0.004, and not better."""
    book, theirs = sphere_codebook(8, 8, positive=True), np.array(PARISKV, np.float32)
    np.testing.assert_allclose(book, theirs, atol=4e-3)
    units = np.random.default_rng(0).standard_normal((200_000, 8)).astype(np.float32)
    units = np.abs(units / np.linalg.norm(units, axis=1, keepdims=True))
    mine, other = (np.square(nearest(units, each) - units).mean() for each in (book, theirs))
    assert 0.99 * other < mine <= other


@pytest.mark.parametrize("matrix", [hadamard, random_hadamard, random_orthogonal])
@pytest.mark.parametrize("d", [64, 96, 80])
def test_rotations_are_orthogonal(matrix, d):
    m = matrix(d)
    np.testing.assert_allclose(m @ m.T, np.eye(d), atol=1e-5)


def test_hadamard_has_equal_magnitudes():
    np.testing.assert_allclose(np.abs(hadamard(64)), 1 / 8)
    assert (np.abs(hadamard(96)) > 0).sum() == 96 * 32


def test_uniform_is_within_half_a_step():
    rows = np.random.default_rng(0).standard_normal((3, 50, 8)).astype(np.float16).astype(np.float32)
    for bits in (1, 2, 4):
        step = (rows.max(1) - rows.min(1)) / ((1 << bits) - 1)
        assert (np.abs(uniform(rows, bits, 1) - rows).max(1) <= 0.501 * step).all()
    np.testing.assert_array_equal(uniform(np.full((1, 4, 2), 0.5, np.float32), 2, 1), 0.5)


@pytest.mark.parametrize("axis", [1, 2])
def test_uniform_in_groups_is_uniform_of_each_group(axis):
    rows = np.random.default_rng(0).standard_normal((2, 70, 40)).astype(np.float32)
    made = uniform_in_groups(rows, 2, axis, 32)
    for first in range(0, rows.shape[axis], 32):
        part = (slice(None),) * axis + (slice(first, first + 32),)
        np.testing.assert_array_equal(made[part], uniform(rows[part], 2, axis))


def test_nearest_and_packed_bytes():
    book = np.array([-1, 0, 3], np.float32)
    np.testing.assert_array_equal(nearest(np.array([-5, -0.4, 1.4, 1.6], np.float32), book), [-1, 0, 0, 3])
    assert [packed_bytes(10, bits) for bits in (1, 3, 8)] == [2, 4, 10]


def test_cluster_sums_are_the_looped_sums():
    rows = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    assigned = np.random.default_rng(1).integers(1, 6, 50)
    assigned[assigned == 3] = 4
    sums, sizes = cluster_sums(rows, assigned, 8)
    for cluster in range(8):
        assert sizes[cluster] == sum(assigned == cluster)
        np.testing.assert_allclose(sums[cluster], rows[assigned == cluster].sum(0), atol=1e-5)
