"""PolarQuant's angles, compared with the paper's bits and with sampled angles."""

import numpy as np
import pytest

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import polarquant


def test_bits_are_the_papers():
    """3.875 bits a coordinate: arXiv 2502.02617, section 4."""
    seen = draw(n=2, s=300, d=128)
    assert polarquant.code_bytes(seen) * 8 / (2 * 2 * 296 * 128) == 3.875


@pytest.mark.parametrize("level", [2, 3, 4])
def test_codebook_is_best_for_sampled_angles(level):
    """Angles of normal vectors: the codebook's entries are the means of their cells."""
    radius = np.abs(np.random.default_rng(0).standard_normal((100_000, 2, 1 << (level - 1))))
    x, y = np.sqrt(np.square(radius).sum(-1)).T
    angles = np.arctan2(y, x)
    book = polarquant.angle_codebook(level)
    cell = np.abs(angles[:, None] - book).argmin(1)
    np.testing.assert_allclose([angles[cell == i].mean() for i in range(4)], book, atol=4e-3)


def test_norms_are_kept():
    rows = draw(n=1, s=50).k
    made = polarquant.coded(rows)
    np.testing.assert_allclose(np.linalg.norm(made, axis=-1), np.linalg.norm(rows, axis=-1), rtol=1e-3)
    error = np.square(made - rows).sum() / np.square(rows).sum()
    assert 0.01 < error < 0.05
