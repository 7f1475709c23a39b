"""Discarded ranges against an array."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftl.discards import Discards

PAGES = 40
steps = st.lists(st.tuples(st.booleans(), st.integers(0, PAGES - 1), st.integers(1, PAGES)), max_size=30)


@given(steps)
def test_undone_discards_were_written_before(steps):
    discards, undone, written, now = Discards(), np.zeros(PAGES, int), np.zeros(PAGES, int), 0
    for write, first, count in steps:
        end, now = min(PAGES, first + count), now + 1
        if write:
            written[first:end] = now
        else:
            written[first:end], undone[first:end] = 0, now
            discards.add(first, end, now, lambda a, b: not written[a:b].any())
        result = discards.undone(np.arange(PAGES))
        assert (result[undone > 0] >= undone[undone > 0]).all(), "nothing that was discarded comes back"
        assert (result[written > 0] < written[written > 0]).all(), "all that was written since stays"
        assert not result[(undone == 0)].any() or (written[(undone == 0) & (result > 0)] == 0).all()
        ranges = discards.ranges
        assert all(b <= c for (_, b, _), (c, _, _) in pairwise(ranges))
    assert Discards(map(list, discards.ranges)).ranges == discards.ranges


def test_adjacent_discards_are_merged():
    discards = Discards()
    for number, first in enumerate((0, 20, 10), 5):
        discards.add(first, first + 10, number, lambda *_: True)
    assert discards.ranges == [(0, 30, 7)]
    discards.add(30, 40, 9, lambda a, b: a >= 30)  # something was written to the first again
    assert discards.ranges == [(0, 30, 7), (30, 40, 9)]


def test_empty_discards_undo_nothing():
    assert Discards().undone(np.arange(3)).tolist() == [0, 0, 0]
