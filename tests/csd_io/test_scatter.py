"""Ranges of a file arrive in the right buffers, with io_uring, with threads, and through the page cache."""

import errno

import numpy as np
import pytest

from csd_io.queue import address, aligned
from csd_io.scatter import Scatter, coalesce_ranges

BLOCK = 4096


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).integers(0, 255, 200 * BLOCK, np.uint8).tobytes())
    return path


@pytest.mark.parametrize("ways", [{}, {"ring": False}, {"direct": False}, {"ring": False, "direct": False}])
def test_ranges_are_read_to_their_addresses(path, ways):
    scatter, memory, content = Scatter(path, **ways), aligned(200 * BLOCK), path.read_bytes()
    assert ways == {} or scatter.fallback_reason
    numbers = np.random.default_rng(1).permutation(200)[:150]
    offsets = numbers * BLOCK
    results = scatter.read(offsets, address(memory) + offsets, np.full(150, BLOCK))
    scatter.close()
    assert (results == BLOCK).all()
    for number in range(200):
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        assert bytes(memory[part]) == (content[part] if number in numbers else bytes(BLOCK))


@pytest.mark.parametrize("ring", [True, False])
def test_failed_range_does_not_stop_others(path, ring):
    scatter, memory = Scatter(path, ring=ring), aligned(4 * BLOCK)
    offsets = np.array([0, 1000 * BLOCK, 199 * BLOCK])
    results = scatter.read(offsets, np.array([address(memory), address(memory), 16]), np.full(3, BLOCK))
    scatter.close()
    assert results.tolist() == [BLOCK, 0, -errno.EFAULT]


def test_smallest_gaps_bridged_first_within_overread_limit():
    numbers = np.array([0, 1, 3, 4, 9, 10, 11, 20])
    assert [bound.tolist() for bound in coalesce_ranges(numbers, 0, 9)] == [
        [0, 3, 9, 20],
        [2, 5, 12, 21],
    ]
    assert [bound.tolist() for bound in coalesce_ranges(numbers, 1, 9)] == [[0, 9, 20], [5, 12, 21]]
    assert [bound.tolist() for bound in coalesce_ranges(numbers, 5, 9)] == [[0, 20], [12, 21]]
    assert [bound.tolist() for bound in coalesce_ranges(numbers, 13, 9)] == [[0], [21]]
    assert [bound.tolist() for bound in coalesce_ranges(numbers[:1], 0, 9)] == [[0], [1]]
    assert [bound.tolist() for bound in coalesce_ranges(numbers, 13, 3)] == [[0, 9, 20], [5, 12, 21]]
