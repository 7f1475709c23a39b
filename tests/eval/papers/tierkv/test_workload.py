"""Requests that return over one link: the engine against closed forms.

partner of: eval/papers/tierkv/workload.py
"""

from itertools import pairwise

import pytest

from vcsd_eval.papers.tierkv.reading import Reading
from vcsd_eval.papers.tierkv.workload import served

AT = Reading(1.2, 3.15, 0.25)
COPIES = AT.copies_ms[2::8]


def test_without_window_every_copy_is_waited_for():
    result = served(AT.compute_ms, AT.copies_ms, 0)
    assert result.tpot_ms == pytest.approx(AT.tpot_ms(0), rel=1e-6) and result.hits < 1e-6


@pytest.mark.parametrize("mean_ms", [0.6, 1.2, 3.15, 6.54])
@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_no_window_exceeds_the_rate_of_the_link(window, mean_ms):
    at = Reading(1.2, mean_ms, 0.25)
    result = served(at.compute_ms, at.copies_ms[2::8], window)
    assert result.tpot_ms == pytest.approx(
        at.conserved_tpot_ms(window), rel=0.05 if mean_ms == 1.2 else 0.003
    )  # in between queues form
    assert result.tpot_ms >= max(at.compute_ms, at.mean_ms) * (1 - 1e-3)
    assert 0 <= result.hits <= 1


def test_a_longer_window_is_not_worse():
    times = [served(AT.compute_ms, COPIES, window).tpot_ms for window in (0, 1, 2, 4)]
    assert all(later <= sooner * (1 + 1e-6) for sooner, later in pairwise(times))
