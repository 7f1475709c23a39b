"""ParisKV's votes and re-rank, compared with plain loops."""

import math

import numpy as np
import pytest

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import pariskv


def test_votes_are_the_looped_tiers():
    seen = draw(n=1, s=120, d=16)
    clusters, _ = pariskv.encode(seen.k)
    q = pariskv.blocks(seen.q.mean(1))
    votes = np.zeros(120, int)
    for block in range(2):
        members = {}
        for token in range(120):
            members.setdefault(int(clusters[0, token, block]), []).append(token)
        signs = {c: [1 if c >> i & 1 else -1 for i in range(8)] for c in members}
        ordered = sorted(members, key=lambda c: -float(np.dot(signs[c], q[0, block])))
        for tier in (0.05, 0.15, 0.30, 0.50, 0.75, 1.0):
            taken = 0
            for cluster in ordered:
                if taken >= math.ceil(120 * 0.5 * tier):
                    break
                votes[members[cluster]] += 1
                taken += len(members[cluster])
    np.testing.assert_array_equal(pariskv.collisions(q, clusters, 0.5)[0], votes)


def test_estimate_of_own_direction_is_exact():
    """The weight makes <w u_b, k_b> = |k_b|^2 for each block."""
    k = draw(n=2, s=100).k
    _, coded = pariskv.encode(k)
    parts = pariskv.blocks(k)
    np.testing.assert_allclose((coded * parts).sum(-1), np.square(parts).sum(-1), rtol=2e-3)
    assert (np.sign(coded) == np.where(parts > 0, 1, -1)).all()


def test_rank_estimates_are_close_to_products():
    seen = draw()
    _, coded = pariskv.encode(seen.k)
    estimated = coded.reshape(2, -1, 64) @ pariskv.blocks(seen.q.mean(1)).reshape(2, 64, 1)
    exact = seen.k @ seen.q.mean(1)[..., None]
    assert np.abs(estimated - exact).mean() < 0.1 * np.abs(exact).mean()


@pytest.mark.parametrize(("tokens", "expected"), [(4_999, (0.5, 0.5)), (5_000, (0.25, 0.3)), (90_000, (0.1, 0.2))])
def test_candidate_ratios_equal_published_ones(tokens, expected):
    assert tuple(pariskv.ratios(tokens)) == expected


def test_bytes_by_hand():
    seen = draw(n=1, s=1028)
    answer = pariskv.pariskv(seen, 1 / 4)
    left = 1028 * 256 / 4 - 1024 * 8 - 4 * 256
    candidates = min(512, int(left / 2 / (32 + 16)))
    assert answer.nbytes == 1024 * 8 + candidates * (32 + 16) + answer.attended.sum() * 256
