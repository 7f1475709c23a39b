"""The closed-form model: its limits, and the gain if a link is not counted twice."""

import pytest

from vcsd_eval.papers.tierkv.constants import COMPUTE, COPIES, SPREAD, SWEEP_COPIES
from vcsd_eval.papers.tierkv.reading import Reading

AT_3X = Reading(COMPUTE.value, COPIES[3].value, SPREAD.value)


def test_tpot_without_window_and_with_long_window():
    assert AT_3X.tpot_ms(0) == pytest.approx(1.2 + 3.15)
    assert AT_3X.tpot_ms(100) == pytest.approx(1.2)
    assert (AT_3X.hits(0), AT_3X.hits(100)) == (0, 1)
    times = [AT_3X.tpot_ms(window) for window in range(6)]
    assert times == sorted(times, reverse=True)


def test_reading_without_copies_has_no_stall():
    idle = Reading(1.2, 0, 0.25)
    assert (idle.tpot_ms(0), idle.hits(0), idle.conserved_tpot_ms(4), idle.conserved_hits(0)) == (1.2, 1, 1.2, 1)


@pytest.mark.parametrize("copies", [0.1, 1.2, 3.15, 20.0])
def test_overlap_on_one_link_gains_at_most_2x(copies):
    at = Reading(1.2, copies, 0.25)
    times = [at.conserved_tpot_ms(window) for window in range(5)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[-1] <= 2 + 1e-9
    assert times[-1] >= copies
    assert at.conserved_hits(4) <= 1


def worst(spread):
    """The largest error of the values that fix the spread."""
    printed = [(1.37, 4, 1.20), (3.15, 4, 1.20), (5.05, 4, 1.79), (6.54, 4, 3.10)]
    printed += [(SWEEP_COPIES.value, window, value) for window, value in ((0, 4.38), (1, 3.19), (2, 2.10))]
    return max(abs(Reading(1.2, mean, spread).tpot_ms(window) / value - 1) for mean, window, value in printed)


def test_assumed_spread_fits_best():
    others = {spread: worst(spread) for spread in (0.20, 0.22, 0.28, 0.30)}
    assert worst(SPREAD.value) < 0.028
    assert worst(SPREAD.value) < min(others.values())
