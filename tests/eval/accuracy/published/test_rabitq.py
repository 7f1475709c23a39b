"""RaBitQ's estimator, compared with the theorem of its paper."""

import numpy as np

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import codes, rabitq


def estimates(k, q, seed, monkeypatch):
    """Estimates of q k (T,) under the random rotation of a seed, nothing centered."""
    monkeypatch.setattr(rabitq, "random_orthogonal", lambda d: codes.random_orthogonal(d, seed))
    center = k.mean(0)
    made = rabitq.encode((k - center)[None], np.zeros((1, 1, 1, k.shape[1]), np.float32))
    return rabitq.estimate(q[None, None], made)[0, 0], (k - center) @ q


def test_estimator_is_unbiased_and_within_bound(monkeypatch):
    """Theorem 3.2: over rotations the mean is q k, and with eps0 = 1.9 at least 94 % of errors are within the bound."""
    random = np.random.default_rng(3)
    k = random.standard_normal((40, 64)).astype(np.float32)
    q = random.standard_normal(64).astype(np.float32)
    result = [estimates(k, q, seed, monkeypatch) for seed in range(400)]
    errors = np.array([estimate - exact for estimate, exact in result])
    norms = np.linalg.norm(k - k.mean(0), axis=1) * np.linalg.norm(q)
    deviation = errors.std(0) / np.sqrt(len(errors))
    assert np.abs(errors.mean(0) / deviation).max() < 4.5
    # <x, Po> is close to sqrt(2 / pi); the bound is |k| |q| sqrt((1 - <x, Po>^2) / <x, Po>^2) eps0 / sqrt(d - 1)
    bound = norms * np.sqrt((1 - 2 / np.pi) / (2 / np.pi)) * 1.9 / np.sqrt(63)
    assert (np.abs(errors) < bound).mean() > 0.93
    assert np.abs(errors).mean() > 0.2 * bound.mean()


def test_centering_is_an_identity():
    """With the codes' signs and scales replaced by exact keys the centered sum is q k."""
    seen = draw()
    signs, scales, mean_q_k, mean_q, center = rabitq.encode(seen.k, seen.prompt_q)
    exact = (seen.k - center[:, None]) @ codes.random_orthogonal(64)
    made = rabitq.estimate(seen.q, (exact, np.ones_like(scales), mean_q_k, mean_q, center))
    np.testing.assert_allclose(made, seen.q @ seen.k.transpose(0, 2, 1), atol=0.1)  # mean_q_k is in FP16
    assert set(np.unique(signs)) == {-1, 1}
