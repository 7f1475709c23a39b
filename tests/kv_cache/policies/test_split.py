"""Cached parts of layers by the hit rate of earlier iterations."""

import pytest

from kv_cache.policies.split import PATIENCE, _Feedback

MISS, HALF, HIT = (10, 4), (10, 5), (10, 10)  # bytes read, and found in the cache


def counts(feedback, *hits):
    """Cached parts after each iteration."""
    chosen = list[int]()
    for hit in hits:
        feedback.update(*hit)
        chosen.append(feedback.count)
    return chosen


def test_misses_take_ever_more_parts_away():
    """A change takes effect after an iteration that does not count."""
    assert counts(_Feedback(20, 20), *[MISS] * 9) == [19, 19, 17, 17, 13, 13, 5, 5, 0]
    assert counts(_Feedback(20, 20), MISS, MISS, HALF, MISS) == [19, 19, 19, 18], "half of the bytes is enough"


def test_hits_add_ever_more_parts_after_a_while():
    feedback = _Feedback(20, 0)
    assert counts(feedback, *[HIT] * PATIENCE[0]) == [0] * PATIENCE[0]
    assert counts(feedback, *[HIT] * 11) == [1, 1, 3, 3, 7, 7, 15, 15, 20, 20, 20]
    assert counts(feedback, HALF, HIT) == [20, 20]


def test_a_miss_ends_the_calm():
    feedback = _Feedback(20, 5)
    assert counts(feedback, *[HIT] * PATIENCE[0], HALF, *[HIT] * PATIENCE[0]) == [5] * (2 * PATIENCE[0] + 1)
    assert counts(feedback, HIT) == [6]


@pytest.mark.parametrize("fails", [1, 2, 20])
def test_an_increase_that_fails_is_undone_and_is_tried_later(fails):
    feedback, patience = _Feedback(20, 5), PATIENCE[0]
    for _ in range(fails):
        assert counts(feedback, *[HIT] * patience) == [5] * patience
        assert counts(feedback, HIT, HIT, MISS, HIT, HIT) == [6, 6, 5, 5, 5]
        patience = min(2 * patience, PATIENCE[1])
        feedback.calm = 0
    assert feedback.patience == patience
    counts(feedback, *[HIT] * (patience + 3))
    assert feedback.patience == PATIENCE[0], "one that succeeds"
