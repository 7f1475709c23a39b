"""Rotated rows of V keep their length, and the inverse rotation restores them.

partner of: csd_io/rotation.py
"""

import numpy as np
import pytest

from csd_io.rotation import rotate, rotate_back


@pytest.mark.parametrize("d", [64, 80, 96, 116, 128, 3])
def test_inverse_rotation_restores_rows(d):
    rows = np.random.default_rng(4).standard_normal((5, d)).astype(np.float32)
    for row in rows:
        turned = row.copy()
        rotate(turned)
        np.testing.assert_allclose(np.linalg.norm(turned), np.linalg.norm(row), rtol=1e-6)
        assert d == 3 or np.abs(turned - row).max() > 0.5
        rotate_back(turned)
        np.testing.assert_allclose(turned, row, atol=1e-6)


def test_rotation_spreads_one_outlier_over_channels():
    row = np.zeros(96, np.float32)
    row[37] = 1
    rotate(row)
    assert (row[:32] == 0).all() and (row[64:] == 0).all()
    np.testing.assert_allclose(np.abs(row[32:64]), 32**-0.5, rtol=1e-6)
