"""Large arrays that cost memory only where they are written."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap module names it from 3.13


def lazy_memory(size: int, huge: bool = True) -> mmap.mmap:
    """Zeroed memory on pages that the kernel supplies at first touch: a 2 TB drive fits a laptop. huge: large ones."""
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    # What is read page by page would wait for a page walk each time; what comes and goes page by page has to be small
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return memory


def as_array(memory: mmap.mmap, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Memory as an array."""
    return np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape)


def lazy_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A zeroed array on such memory."""
    return as_array(lazy_memory(math.prod(shape) * np.dtype(dtype).itemsize), shape, dtype)


def release(memory: mmap.mmap, first: int, size: int) -> None:
    """Let bytes read as zeros, and give back the kernel's pages that lie in them whole."""
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        memory[first : first + size] = bytes(size)
        return
    memory[first:begin] = bytes(begin - first)
    memory[end : first + size] = bytes(first + size - end)
    memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
