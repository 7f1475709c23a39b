"""SnapKV and KeyDiff, compared with plain loops in float64."""

import numpy as np

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import evict


def looped_votes(seen):
    """Softmax weights of the last queries, query by query."""
    N, G, W, d = seen.prompt_q.shape
    total = np.zeros((N, seen.prompt))
    for n in range(N):
        for g in range(G):
            for w in range(W):
                length = seen.prompt - W + w + 1
                logits = seen.k[n, :length].astype(np.float64) @ seen.prompt_q[n, g, w] / d**0.5
                weights = np.exp(logits - logits.max())
                total[n, :length] += weights / weights.sum()
    return total


def test_votes_are_the_looped_sum():
    seen = draw(s=100)
    np.testing.assert_allclose(evict.votes(seen), looped_votes(seen), atol=1e-5)


def test_snapkv_keeps_window_and_best_pooled_votes():
    seen = draw(s=204)
    answer = evict.snapkv(seen, 60.5 / 200)
    votes = looped_votes(seen)[:, :184]
    for n in range(2):
        mean = [sum(votes[n, max(i - 2, 0) : i + 3]) / 5 for i in range(184)]
        best = sorted(range(184), key=lambda i: -mean[i])[: 56 - 16]  # 4 recent tokens, 16 in the window
        assert set(np.flatnonzero(answer.attended[n])) == {*best, *range(184, 204)}
    assert answer.nbytes == 2 * 60 * 256


def test_snapkv_small_budget_keeps_last_window_tokens():
    seen = draw(s=204, window=32)
    kept = np.flatnonzero(evict.snapkv(seen, 20.5 / 200).attended[0])
    np.testing.assert_array_equal(kept, np.arange(184, 204))


def test_keydiff_keeps_keys_unlike_the_mean_direction():
    seen = draw(s=204)
    answer = evict.keydiff(seen, 60.5 / 200)
    for n in range(2):
        keys = seen.k[n, :200].astype(np.float64)
        units = [key / np.linalg.norm(key) for key in keys]
        anchor = np.mean(units, 0)
        best = sorted(range(200), key=lambda i: float(units[i] @ anchor))[:56]
        assert set(np.flatnonzero(answer.attended[n])) == {*best, *range(200, 204)}
