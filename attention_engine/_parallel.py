"""Parallel streams: one thread handles a whole stream, so the number of threads has no effect on the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")


os.register_at_fork(after_in_child=_pool.cache_clear)  # the threads of the executor do not survive a fork


def over_streams(kernel: Callable[..., None], threads: int, streams: int, arguments: tuple[Any, ...]) -> None:
    """Run kernel(begin, end, *arguments) for ranges that cover all streams. The kernel must release the GIL."""
    if threads == 1:
        kernel(0, streams, *arguments)
        return
    step = -(-streams // (4 * threads))
    parts = [
        _pool(threads).submit(kernel, begin, min(begin + step, streams), *arguments)
        for begin in range(0, streams, step)
    ]
    for part in parts:
        part.result()
