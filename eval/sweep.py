"""Runs of an experiment side by side, in processes or on a Ray cluster: results as of one after the other.

`sweep_rest` continues a sweep that was killed.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from csd_io.parent_death import end_with_parent
from csd_spec.optional import require
from vcsd.progress import Tick, no_tick
from vcsd_eval.partial_results import ResultCache

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Item, Tick], Result]  # a function of a module, which ticks as its parts are done
Done = Callable[[int, Any], None]  # called in this process with an item's number and result as soon as it has one
CONNECT_TIMEOUT_S = 5.0
WATCHED_S = 0.2  # how often ticks are passed on


def no_done(number: int, result: Any) -> None:
    """A `Done` without effect."""


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def sweep(
    work: Work[Item, Result], items: Sequence[Item], jobs: int = 1, tick: Tick = no_tick, done: Done = no_done
) -> list[Result]:
    """Apply `work` to each item in worker processes; items that take longest should be first.

    Raises a worker's exception, or ChildProcessError if a worker process dies.
    """
    jobs = min(jobs, len(items))
    if jobs < 2:
        results = []
        for number, item in enumerate(items):
            results.append(work(item, tick))
            done(number, results[-1])
        return results
    ticks = multiprocessing.get_context("spawn").SimpleQueue()
    with workers(jobs, ticks) as pool:
        return _gathered([pool.submit(_work, work, item) for item in items], ticks, tick, done)


@contextmanager
def workers(count: int, ticks: Any = None, method: str = "spawn") -> Iterator[ProcessPoolExecutor]:
    """Worker processes for the time of a block. They are killed if it raises, and when this process ends in any way.

    Args:
        count: Number of processes.
        ticks: Queue to which their work reports its parts.
        method: How multiprocessing starts them.

    Raises:
        ChildProcessError: A worker died.
    """
    context: Any = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(count, context, _join, (os.getpid(), ticks))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise ChildProcessError("a worker died, perhaps for want of memory: try fewer of them") from error
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def sweep_on_ray(
    work: Work[Item, Result], items: Sequence[Item], address: str, tick: Tick = no_tick, done: Done = no_done
) -> list[Result]:
    """The same on a Ray cluster, a core for each item. address: as Ray has it: `auto`, `local`, `ray://HOST:PORT`.

    Raises ValueError where Ray is not installed, or no cluster is there.
    """
    require("--ray", "ray", "ray")
    import ray
    from ray.util.queue import Queue

    try:
        _check_reachable(address)
        ray.init(address, log_to_driver=False, logging_level="error", include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"ray = {address!r}: {str(error).splitlines()[0]}") from error
    try:
        ticks = Queue(actor_options={"num_cpus": 0})
        remote = ray.remote(_work_on_ray)
        return _gathered([remote.remote(work, item, ticks).future() for item in items], ticks, tick, done)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT or ray://HOST:PORT: Ray's own attempt takes minutes to fail."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()


def _same(value: Any) -> Any:
    return value


def sweep_rest(
    items: Sequence[Item],
    results: ResultCache,
    compute: Callable[[Sequence[Item], Done], object],
    encode: Callable[[Result], Any] = _same,
    decode: Callable[[Any], Result] = _same,
) -> list[Result]:
    """Results of items, in order; those that an earlier run has kept are not computed again.

    Args:
        items: Values whose text (`repr`) names all that their results depend on, except for sources.
        kept: Results by digest of the item.
        compute: Sweeps items, and calls what it is given for each.
        encode: Result as JSON types.
        decode: The inverse.
    """
    keys = [hashlib.sha256(repr(item).encode()).hexdigest()[:16] for item in items]
    left = [(key, item) for key, item in zip(keys, items, strict=True) if key not in results]
    if left:
        compute([item for _, item in left], lambda number, result: results.put(left[number][0], encode(result)))
    return [decode(results[key]) for key in keys]


def _gathered(futures: Sequence[Future[Result]], ticks: Any, tick: Tick, done: Done) -> list[Result]:
    """Results in order, ticks and results as they come; the first error ends it."""
    waiting, left = True, set(range(len(futures)))
    while waiting:
        waiting = bool(wait(futures, WATCHED_S, FIRST_EXCEPTION).not_done)
        while not ticks.empty():
            tick(ticks.get())
        for number in sorted(number for number in left if futures[number].done() and not futures[number].exception()):
            left.remove(number)
            done(number, futures[number].result())
        waiting &= not any(future.done() and future.exception() for future in futures)
    for failed in (future for future in futures if future.done() and future.exception()):
        failed.result()
    return [future.result() for future in futures]


_ticks: Any = None  # of a worker: where it says that a part is done


def _join(parent: int, ticks: Any) -> None:
    global _ticks
    _ticks = ticks
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent ends its workers


def _work(work: Work[Item, Result], item: Item) -> Result:
    return work(item, _ticks.put)


def _work_on_ray(work: Work[Item, Result], item: Item, ticks: Any) -> Result:
    return work(item, ticks.put)
