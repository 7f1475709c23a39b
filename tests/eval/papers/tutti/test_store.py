"""Blocks of prompts: stored blocks of a prompt's prefix, and the order of eviction.

partner of: eval/papers/tutti/store.py
"""

import random

import pytest

from vcsd_eval.papers.tutti.store import BlockStore


def test_store_finds_leading_blocks_of_prompt():
    store = BlockStore(None)
    store.put([1, 2, 3])
    assert [store.leading(each) for each in ([1, 2, 3, 4], [1, 2, 5], [9], [])] == [3, 2, 0, 0]
    assert (len(store), store.written) == (3, 3)


def test_oldest_leaf_blocks_are_evicted_first():
    store = BlockStore(4)
    store.put([1, 2, 3])
    store.put([1, 4])
    store.put([1, 5])  # 3 is the oldest leaf
    assert [store.leading(each) for each in ([1, 2, 3], [1, 4], [1, 5])] == [2, 2, 2]
    assert store.written == 5


def test_too_long_prompt_keeps_its_beginning():
    store = BlockStore(2)
    store.put([1, 2, 3])
    assert (len(store), store.leading([1, 2, 3])) == (2, 2)
    none = BlockStore(0)
    none.put([1])
    assert (len(none), none.written) == (0, 0)


@pytest.mark.parametrize("room", (1, 5, 20))
def test_stored_block_has_all_its_ancestors(room):
    """A block's parent is its number halved."""
    generator, store = random.Random(1), BlockStore(room)
    for _ in range(300):
        leaf = generator.randrange(1, 128)
        path = [leaf >> up for up in reversed(range(leaf.bit_length()))]
        store.put(path)
        assert len(store) <= room and store.leading(path) == min(room, len(path))
        assert all(each == 1 or each >> 1 in store._used for each in store._used)
