"""Arrays that take memory only for written elements."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from ftl.flash.memory import as_array, release, reserve_memory, reserve_zeros


def test_reserved_array_allocates_no_memory():
    array = reserve_zeros((1 << 40,), np.uint8)
    array[1 << 39] = 3
    assert array[1 << 39] == 3 and array[0] == 0


def test_released_memory_reads_zero_rest_is_kept():
    page = mmap.PAGESIZE
    memory = reserve_memory(8 * page)
    array = as_array(memory, (8 * page,), np.uint8)
    for first, size in ((page, 3 * page), (100, 3 * page), (5 * page + 7, 20)):
        array[:] = 9
        release(memory, first, size)
        assert not array[first : first + size].any()
        assert (array == 0).sum() == size


@pytest.mark.parametrize(("words", "flag"), [((), "hg"), ((True,), "hg"), ((False,), "nh")])
def test_kernel_is_told_the_size_of_pages(words, flag):
    memory = reserve_memory(4 << 20, *words)
    start = f"{np.frombuffer(memory, np.uint8).ctypes.data:x}-"
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(f"\n{start}")
    flags = next(line for line in mapping.splitlines() if line.startswith("VmFlags"))
    assert flag in flags.split()
