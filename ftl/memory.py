"""Large arrays that cost memory only where they are written."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap module names it from 3.13


def lazy_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A zeroed array on anonymous pages that the kernel supplies at first touch: a 2 TB drive fits a laptop."""
    size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape)
