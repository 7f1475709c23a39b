"""KIVI and FIER, compared with plain loops in float64.

partner of: eval/accuracy/published/fier.py
"""

import numpy as np
import pytest

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import fier, kivi
from vcsd_eval.accuracy.published.codes import uniform_in_groups


def looped(values, bits):
    """Round-to-nearest asymmetric codes of a list of numbers, dequantized, with scale and zero point in FP16."""
    low = float(np.float16(min(values)))
    scale = float(np.float16((max(values) - low) / (2**bits - 1)))
    return [low + scale * min(max(round((value - low) / scale), 0), 2**bits - 1) for value in values]


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_is_the_looped_algorithm(bits):
    seen = draw(n=1, s=300, d=64)
    k, v = (part[0, : seen.prompt].astype(np.float64) for part in (seen.k, seen.v))
    expected_k, expected_v = k.copy(), v.copy()
    assert seen.prompt == 296
    for first in range(0, 256, 32):  # 296 mod 128 = 40 keys stay
        for channel in range(64):
            expected_k[first : first + 32, channel] = looped(k[first : first + 32, channel], bits)
    for token in range(296 - 128):  # 128 values stay
        for first in (0, 32):
            expected_v[token, first : first + 32] = looped(v[token, first : first + 32], bits)
    made_k, made_v = kivi.encode(seen.k[:, :296], seen.v[:, :296], bits)
    # float32 and float64 may round a tie to different codes
    assert (np.abs(made_k[0] - expected_k) > 1e-4).mean() < 1e-3
    assert (np.abs(made_v[0] - expected_v) > 1e-4).mean() < 1e-3


def test_kivi_bytes_by_hand():
    seen = draw(n=2, s=300, d=64)
    k = 256 * 64 * 2 // 8 + 8 * 64 * 4 + 40 * 64 * 2
    v = 168 * 64 * 2 // 8 + 168 * 2 * 4 + 128 * 64 * 2
    assert kivi.code_bytes(seen, 2) == 2 * (k + v)


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
