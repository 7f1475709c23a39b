"""MagicPIG's sampling, compared with its probabilities and with dense attention."""

from dataclasses import replace

import numpy as np
import pytest

from tests.eval.accuracy.published.random_streams import dense, draw, error
from vcsd_eval.accuracy.published import codes, magicpig


@pytest.fixture
def hyperplanes(monkeypatch):
    """Sets the seed of the hyperplanes."""

    def set_seed(seed):
        monkeypatch.setattr(magicpig, "gaussian_matrix", lambda m, d: codes.gaussian_matrix.__wrapped__(m, d, seed))

    return set_seed


@pytest.mark.parametrize("setting", [(4, 20), (6, 75)])
def test_sampling_probability(hyperplanes, setting):
    """Frequency of two shared buckets over hyperplanes is the formula, which the binomial distribution gives too."""
    random = np.random.default_rng(0)
    k = random.standard_normal((1, 12, 32)).astype(np.float32)
    q = (0.7 * k[:, :1] + random.standard_normal((1, 1, 32))).astype(np.float32)
    cosine = (k @ q[0, 0])[0] / np.linalg.norm(k[0], axis=1) / np.linalg.norm(q)
    expected = magicpig.probability(cosine, *setting)
    hits = np.zeros(12)
    for seed in range(120):
        hyperplanes(seed)
        hits += magicpig.shared(magicpig.hashes(q), magicpig.hashes(k), *setting)[0, 0] >= 2
    np.testing.assert_allclose(hits / 120, expected, atol=4.5 * (0.25 / 120) ** 0.5)
    p = (1 - np.arccos(cosine) / np.pi) ** setting[0]
    at_least_2 = 1 - sum(np.array([1, setting[1]][i]) * p**i * (1 - p) ** (setting[1] - i) for i in (0, 1))
    np.testing.assert_allclose(expected, at_least_2, rtol=1e-3)


def test_importance_weights_remove_the_bias(hyperplanes):
    """The mean output over hyperplanes is closer to dense attention than single outputs are."""
    seen = draw(n=1, s=300)
    expected = dense(seen)[0]
    outs = []
    for seed in range(60):
        hyperplanes(seed)
        outs.append(magicpig.magicpig(replace(seen, kept={}), 1.0).out)
    single = np.mean([error(out, expected) for out in outs])
    assert error(np.mean(outs, 0), expected) < 0.25 * single


def test_bytes_by_hand():
    seen = draw(n=1, g=2, s=300)
    answer = magicpig.magicpig(seen, 1 / 2)
    result = []
    for bits, tables in magicpig.LADDER:
        k = seen.k[:, : seen.prompt]
        center = k.mean(1).astype(np.float16).astype(np.float32)
        keys, queries = magicpig.hashes(k - center[:, None]), magicpig.hashes(seen.q)
        ends = {*range(4), *range(seen.prompt - 64, seen.prompt)}
        nbytes = 128 + 256 * (len(ends) + 4)
        for g in range(2):
            shared = [
                sum(a >> 10 - bits == b >> 10 - bits for a, b in zip(queries[0, g, :tables], key[:tables], strict=True))
                for key in keys[0]
            ]
            inner = [count for token, count in enumerate(shared) if token not in ends]
            nbytes += 8 * tables + 4 * sum(inner) + 256 * sum(count >= 2 for count in inner)
        result.append(nbytes)
    assert answer.nbytes == max(each for each in result if each <= seen.dense_bytes / 2)
