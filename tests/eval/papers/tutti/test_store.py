"""Blocks of prompts: stored blocks of a prompt's prefix, and the order of eviction.

partner of: eval/papers/tutti/store.py
"""

import random

import pytest

from eval.papers.tutti.store import BlockStore


def test_a_prompts_leading_blocks():
    store = BlockStore(None)
    store.put([1, 2, 3])
    assert [store.leading(each) for each in ([1, 2, 3, 4], [1, 2, 5], [9], [])] == [3, 2, 0, 0]
    assert (len(store), store.written) == (3, 3)


def test_leaves_go_before_what_they_need_and_the_oldest_first():
    store = BlockStore(4)
    store.put([1, 2, 3])
    store.put([1, 4])
    store.put([1, 5])  # 3 is the oldest leaf
    assert [store.leading(each) for each in ([1, 2, 3], [1, 4], [1, 5])] == [2, 2, 2]
    assert store.written == 5


def test_of_a_prompt_that_is_too_long_the_beginning_stays():
    store = BlockStore(2)
    store.put([1, 2, 3])
    assert (len(store), store.leading([1, 2, 3])) == (2, 2)
    none = BlockStore(0)
    none.put([1])
    assert (len(none), none.written) == (0, 0)


@pytest.mark.parametrize("room", (1, 5, 20))
def test_whatever_is_stored_has_all_before_it(room):
    """A block's parent is its number halved."""
    generator, store = random.Random(1), BlockStore(room)
    for _ in range(300):
        leaf = generator.randrange(1, 128)
        path = [leaf >> up for up in reversed(range(leaf.bit_length()))]
        store.put(path)
        assert len(store) <= room and store.leading(path) == min(room, len(path))
        assert all(each == 1 or each >> 1 in store._used for each in store._used)
