"""Large arrays that use physical memory only where they are written."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap module names it from 3.13


def reserve_memory(size: int, huge_pages: bool = True) -> mmap.mmap:
    """Reserve zeroed memory that is backed on first touch (MAP_NORESERVE), so that a 2 TB drive fits a laptop.

    Args:
        size: Bytes.
        huge_pages: Use transparent huge pages.
    """
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    # Huge pages save page walks on scattered reads; small pages allow single flash pages to be released
    memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return memory


def as_array(memory: mmap.mmap, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """View memory as an array."""
    return np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape)


def reserve_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Reserve a zeroed array; see `reserve_memory`."""
    return as_array(reserve_memory(math.prod(shape) * np.dtype(dtype).itemsize), shape, dtype)


def release(memory: mmap.mmap, first: int, size: int) -> None:
    """Zero a byte range, and return the kernel pages that lie entirely inside it to the system."""
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        memory[first : first + size] = bytes(size)
        return
    memory[first:begin] = bytes(begin - first)
    memory[end : first + size] = bytes(first + size - end)
    memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
