"""FIER, compared with plain computations."""

import numpy as np

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import fier
from vcsd_eval.accuracy.published.codes import uniform_in_groups


def test_fier_keys_are_the_extremes_of_their_group():
    """1 bit has two values: a group's least and largest, and the boundary is half-way."""
    k = draw(n=1, s=64).k
    made = uniform_in_groups(k, 1, 1, fier.GROUP)
    for first in (0, 32):
        part = k[0, first : first + 32]
        low, high = part.min(0), part.max(0)
        expected = np.where(part > (low + high) / 2, high, low)
        differing = np.abs(made[0, first : first + 32] - expected) > 4e-3
        assert differing.mean() < 2e-3  # values next to the boundary: zero point and scale are in FP16


def test_fier_bytes_by_hand():
    seen = draw(n=2, s=300, d=64)
    assert fier.code_bytes(seen) == 2 * (296 * 64 // 8 + 10 * 64 * 4)
