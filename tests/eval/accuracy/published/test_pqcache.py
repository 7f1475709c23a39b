"""PQCache's product quantization, compared with plain loops in float64."""

import numpy as np

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import pqcache
from vcsd_eval.accuracy.published.codes import SEED


def looped_kmeans(points, count):
    """Lloyd's iteration point by point from the same start."""
    points = points.astype(np.float64)
    centroids = points[np.random.default_rng(SEED).choice(len(points), count, replace=False)].copy()
    for _ in range(pqcache.ITERATIONS):
        members = [[] for _ in range(count)]
        for point in points:
            members[int(np.argmin([np.sum((point - each) ** 2) for each in centroids]))].append(point)
        for index, group in enumerate(members):
            if group:
                centroids[index] = np.mean(group, 0)
    return centroids


def test_kmeans_is_the_looped_iteration():
    points = draw(n=1, s=150, d=16).k[0]
    np.testing.assert_allclose(pqcache.kmeans(points, 8), looped_kmeans(points, 8), atol=5e-3)


def test_estimate_is_product_with_centroids():
    seen = draw(n=2, s=200)
    centroids, codes = pqcache.encode(seen.k)
    rebuilt = np.concatenate([np.stack([centroids[n, m][codes[n, m]] for n in range(2)]) for m in range(2)], -1)
    np.testing.assert_allclose(
        pqcache.estimate(seen.q, centroids, codes), seen.q @ rebuilt.transpose(0, 2, 1), rtol=1e-4, atol=1e-3
    )
    assert np.square(seen.k - rebuilt).mean() < 0.7 * np.square(seen.k - seen.k.mean(1, keepdims=True)).mean()


def test_bytes_by_hand():
    assert pqcache.code_bytes(draw(n=3, s=300, d=64)) == 3 * (296 * 12 // 8 + 2 * 64 * 32 * 2)


def test_centroid_without_points_stays():
    points = np.repeat(np.array([[1, 2], [3, 4]], np.float32), 20, 0)
    assert np.isfinite(pqcache.kmeans(points, 8)).all()
