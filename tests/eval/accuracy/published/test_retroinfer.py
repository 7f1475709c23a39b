"""RetroInfer's index and its estimate, compared with plain loops."""

import numpy as np

from tests.eval.accuracy.published.random_streams import dense, draw, error
from vcsd_eval.accuracy.published import retroinfer


def test_index_has_means_and_sums():
    seen = draw(n=2, s=200)
    index = retroinfer.encode(seen.k, seen.v)
    assert index.sizes.sum(1).tolist() == [200, 200]
    for n in range(2):
        for cluster in range(13):
            inside = index.assigned[n] == cluster
            assert inside.sum() == index.sizes[n, cluster]
            if inside.any():
                np.testing.assert_allclose(index.centroids[n, cluster], seen.k[n, inside].mean(0), rtol=2e-3, atol=2e-3)
                np.testing.assert_allclose(index.sums[n, cluster], seen.v[n, inside].sum(0), rtol=2e-3, atol=2e-2)


def test_output_is_the_looped_estimate():
    seen = draw(n=1, g=2, s=420)
    answer = retroinfer.retroinfer(seen, 0.35)
    index = seen.kept["retroinfer"]
    C, local = index.sizes.shape[1], 416 // 64
    inner = np.arange(4, 416 - local)
    retrieved = {int(index.assigned[0, i]) for i, token in enumerate(inner) if answer.attended[0, token]}
    logits = seen.q[0].astype(np.float64) @ index.centroids[0].T / 8
    weights = np.where(index.sizes[0] > 0, np.exp(logits) * index.sizes[0], 0)
    order = np.argsort(-(weights / weights.sum(1, keepdims=True)).sum(0))
    assert set(order[: len(retrieved)]) == retrieved
    zone = order[len(retrieved) : len(retrieved) + int(np.ceil(0.232 * C))]
    for g in range(2):
        top, bottom = np.zeros(64), 0.0
        for token in np.flatnonzero(answer.attended[0]):
            weight = np.exp(seen.k[0, token].astype(np.float64) @ seen.q[0, g] / 8)
            top, bottom = top + weight * seen.v[0, token], bottom + weight
        for cluster in zone:
            top, bottom = top + np.exp(logits[g, cluster]) * index.sums[0, cluster], bottom + weights[g, cluster]
        np.testing.assert_allclose(answer.out[0, g], top / bottom, rtol=1e-3, atol=1e-4)


def test_estimation_zone_lowers_the_error(monkeypatch):
    seen = draw(n=4, s=1028)
    with_zone = error(retroinfer.retroinfer(seen, 0.2).out, dense(seen)[0])
    monkeypatch.setattr(retroinfer, "ESTIMATED", 0)
    assert with_zone < 0.9 * error(retroinfer.retroinfer(seen, 0.2).out, dense(seen)[0])


def test_segments_are_clustered_apart(monkeypatch):
    monkeypatch.setattr(retroinfer, "SEGMENT", 64)
    index = retroinfer.encode(*(part[:1, :150] for part in (draw().k, draw().v)))
    assert index.sizes.shape == (1, 4 + 4 + 2)
    assert set(index.assigned[0, :64]) <= set(range(4))
    assert set(index.assigned[0, 128:]) <= {8, 9}
