"""Large arrays that cost memory only where they are written, on anonymous memory or on a file."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap module names it from 3.13


def lazy_zeros(
    shape: tuple[int, ...], dtype: DTypeLike, path: Path | None = None, private: bool = False
) -> NDArray[Any]:
    """A zeroed array on pages that the kernel supplies at first touch: a 2 TB drive fits a laptop.

    With `path` the array is that (sparse) file's content, zeroed only where the file is new; `private`: what is
    written to it stays in memory, and no file is made.
    """
    size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    if path is None or (private and not path.exists()):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        memory.madvise(mmap.MADV_HUGEPAGE)  # what is read page by page would wait for a page walk each time
    else:
        mode = "rb" if private else "r+b" if path.exists() else "w+b"
        with path.open(mode) as file:
            if not private:
                file.truncate(size)
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
            memory = mmap.mmap(file.fileno(), size, flags=flags)
    return np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape)


def data_ranges(path: Path) -> list[tuple[int, int]]:
    """Byte ranges [first, end) of a sparse file that were ever written; the holes between them read as zeros."""
    ranges, end = [], 0
    with path.open("rb") as file:
        size = path.stat().st_size
        while end < size:
            try:
                first = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole up to the end
                break
            end = os.lseek(file.fileno(), first, os.SEEK_HOLE)
            ranges.append((first, end))
    return ranges
