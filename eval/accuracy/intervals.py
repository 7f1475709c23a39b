"""Confidence intervals of figures over samples, and tests of paired differences; all at 95 %."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from csd_spec.arrays import F64

CONFIDENCE = 0.95
RESAMPLES = 2000  # of the bootstrap
Shape = Callable[[float], float]


def clopper_pearson(successes: int, trials: int) -> tuple[float, float]:
    """Exact interval of a binomial proportion.

    Args:
        successes: Samples that are 1.
        trials: Samples, at least 1.

    Returns:
        Lowest and highest proportion that a two-sided test at 5 % does not reject.

    Source:
        Clopper and Pearson, Biometrika 26 (1934).
    """
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if successes == 0 else _root(lambda p: _at_least(successes, trials, p) - tail)
    high = 1.0 if successes == trials else _root(lambda p: tail - _at_most(successes, trials, p))
    return low, high


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p value of McNemar's test.

    Args:
        lost: Pairs of which only the first is right.
        gained: Pairs of which only the second is right.

    Returns:
        Probability of a split at least as uneven if both are equally likely; 1 without such pairs.
    """
    count = lost + gained
    splits = sum(math.comb(count, k) for k in range(min(lost, gained) + 1))
    return min(1.0, float(2 * splits / 2**count))


def bootstrap(pairs: F64, seed: int, shape: Shape = float) -> tuple[float, float]:
    """Percentile interval of a ratio of sums, by resampling samples.

    Args:
        pairs: (N, 2), numerator and denominator of each sample.
        seed: Seed of the draws; the same N and seed give the same draws.
        shape: Applied to each ratio.

    Returns:
        The 2.5 % and 97.5 % percentiles.
    """
    return _percentiles(_resampled(pairs, seed, shape))


def paired_bootstrap(pairs: F64, others: F64, seed: int, shape: Shape = float) -> tuple[float, float]:
    """Percentile interval of the difference of two ratios of sums over the same samples.

    Args:
        pairs: (N, 2) as in `bootstrap`.
        others: (N, 2) of the same samples in the same order; these are subtracted.
        seed: Seed of the draws, which are the same for both.
        shape: Applied to each ratio before the difference.

    Returns:
        The 2.5 % and 97.5 % percentiles.
    """
    return _percentiles(_resampled(pairs, seed, shape) - _resampled(others, seed, shape))


def ratio(pairs: F64) -> float:
    """Sum of the numerators (N, 0) divided by that of the denominators (N, 1)."""
    above, below = pairs.sum(0)
    return float(above / below)


def _resampled(pairs: F64, seed: int, shape: Shape) -> F64:
    draws = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    sums = pairs[draws].sum(1)
    return np.array([shape(each) for each in sums[:, 0] / sums[:, 1]])


def _percentiles(values: F64) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _at_most(successes: int, trials: int, p: float) -> float:
    """Probability of at most this number of successes."""
    return math.fsum(_mass(k, trials, p) for k in range(successes + 1))


def _at_least(successes: int, trials: int, p: float) -> float:
    return math.fsum(_mass(k, trials, p) for k in range(successes, trials + 1))


def _mass(k: int, n: int, p: float) -> float:
    """Binomial probability of k of n; by logarithms, as binomial coefficients exceed a float from n = 1,030 on."""
    if p in (0.0, 1.0):
        return float(k == (n if p else 0))
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(choices + k * math.log(p) + (n - k) * math.log1p(-p))


def _root(rising: Callable[[float], float]) -> float:
    """Zero between 0 and 1 of an increasing function."""
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
