"""Streams side by side: each is one thread's from beginning to end, so their number changes no bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has the executor, but none of its threads


def over_streams(kernel: Callable[..., None], threads: int, streams: int, arguments: tuple[Any, ...]) -> None:
    """Run kernel(begin, end, *arguments) so that [begin, end) covers all streams; it must not hold the GIL."""
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
