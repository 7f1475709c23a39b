"""Intervals and paired tests, against published values and direct counting."""

import math

import numpy as np
import pytest

from vcsd_eval.accuracy.intervals import bootstrap, clopper_pearson, mcnemar, paired_bootstrap, ratio


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (12, 12, 0.025 ** (1 / 12), 1.0),  # 0.735: no success can fail
        (0, 12, 0.0, 1 - 0.025 ** (1 / 12)),
        (5, 10, 0.1871, 0.8129),  # tables of the binomial
        (1, 20, 0.00127, 0.2487),
        (81, 263, 0.2527, 0.3676),
        (1, 1, 0.025, 1.0),
    ],
)
def test_clopper_pearson_has_the_published_values(successes, trials, low, high):
    assert clopper_pearson(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_clopper_pearson_many_trials_stays_finite():
    low, high = clopper_pearson(2500, 5000)
    assert (low, high) == pytest.approx((0.4860, 0.5140), abs=2e-4)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_clopper_pearson_covers_95_percent(share):
    """The probability, exactly, that the interval has the share in it."""
    trials = 25
    covered = 0.0
    for hits in range(trials + 1):
        low, high = clopper_pearson(hits, trials)
        if low <= share <= high:
            covered += math.comb(trials, hits) * share**hits * (1 - share) ** (trials - hits)
    assert 0.95 <= covered < 1


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 6, 2 / 64), (8, 2, 112 / 1024), (3, 3, 1.0)],
)
def test_mcnemar_counts_the_splits(lost, gained, p):
    assert mcnemar(lost, gained) == pytest.approx(p)


def test_bootstrap_equal_samples_have_no_spread():
    pairs = np.array([[2.0, 4.0]] * 5)
    assert ratio(pairs) == 0.5
    assert bootstrap(pairs, 0) == (0.5, 0.5)
    assert bootstrap(pairs, 0, math.exp) == (math.exp(0.5),) * 2


def test_paired_bootstrap_constant_difference_has_no_spread():
    """Samples differ much, each pair by the same: unpaired intervals would be wide."""
    others = np.array([[float(n), 1.0] for n in range(20)])
    pairs = others + np.array([0.5, 0.0])
    assert paired_bootstrap(pairs, others, 3) == pytest.approx((0.5, 0.5))
    low, high = bootstrap(pairs, 3)
    assert high - low > 4
