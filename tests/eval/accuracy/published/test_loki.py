"""Loki's components, compared with plain computations."""

import numpy as np

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import loki


def test_components_are_orthogonal_and_ordered():
    k = draw(n=1, s=300).k
    basis = loki.principal_components(k)
    np.testing.assert_allclose(basis[0].T @ basis[0], np.eye(64), atol=3e-3)  # in FP16
    variances = ((k[0] - k[0].mean(0)) @ basis[0]).var(0)
    assert (np.diff(variances) < 0.01 * variances[0]).all()
    singular = np.linalg.svd((k[0] - k[0].mean(0)).astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(variances, singular**2 / 300, rtol=0.01)


def test_all_components_rank_exactly(monkeypatch):
    """With every component the chosen tokens are those with the largest weights."""
    monkeypatch.setattr(loki, "COMPONENTS", 1)
    seen = draw(n=1, g=1, s=300)
    answer = loki.loki(seen, 2.0)
    assert answer.nbytes == 2 * (64 * 64 + 296 * 64) + 4 * 256 + 296 * 128
    monkeypatch.setattr(loki, "COMPONENTS", 1 / 4)
    answer = loki.loki(seen, 0.5)
    products = (seen.k[0, :296] @ seen.q[0, 0]).astype(np.float64)
    chosen = np.flatnonzero(answer.attended[0, :296])
    assert answer.nbytes == 2 * (64 * 64 + 296 * 16) + 4 * 256 + len(chosen) * (256 - 32)
    assert np.mean(np.isin(np.argsort(-products)[:20], chosen)) > 0.6
