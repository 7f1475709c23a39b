"""Runs of an experiment side by side, in processes or on a Ray cluster: results as of one after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from csd_io.death import end_with_parent
from vcsd.progress import Tick, no_tick

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Item, Tick], Result]  # a function of a module, which ticks as its parts are done
WATCHED_S = 0.2  # how often ticks are passed on


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def sweep(work: Work[Item, Result], items: Sequence[Item], jobs: int = 1, tick: Tick = no_tick) -> list[Result]:
    """What `work` makes of each item, in so many processes; those that take longest should be first.

    Raises what a worker raises, and ChildProcessError where one dies.
    """
    jobs = min(jobs, len(items))
    if jobs < 2:
        return [work(item, tick) for item in items]
    ticks = multiprocessing.get_context("spawn").SimpleQueue()
    with workers(jobs, ticks) as pool:
        return _gathered([pool.submit(_work, work, item) for item in items], ticks, tick)


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


def sweep_on_ray(work: Work[Item, Result], items: Sequence[Item], address: str, tick: Tick = no_tick) -> list[Result]:
    """The same on a Ray cluster, a core for each item. address: as Ray has it: `auto`, `local`, `ray://HOST:PORT`.

    Raises ValueError where Ray is not installed, or no cluster is there.
    """
    try:
        import ray
        from ray.util.queue import Queue
    except ImportError as error:
        raise ValueError("--ray needs Ray: pip install 'vcsd[ray]'") from error
    try:
        ray.init(address, log_to_driver=False, logging_level="error", include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ValueError(f"ray = {address!r}: {str(error).splitlines()[0]}") from error
    try:
        ticks = Queue(actor_options={"num_cpus": 0})
        remote = ray.remote(_work_on_ray)
        return _gathered([remote.remote(work, item, ticks).future() for item in items], ticks, tick)
    finally:
        ray.shutdown()


def _gathered(futures: Sequence[Future[Result]], ticks: Any, tick: Tick) -> list[Result]:
    """Results in order, and ticks meanwhile; the first error ends it."""
    waiting = True
    while waiting:
        waiting = bool(wait(futures, WATCHED_S, FIRST_EXCEPTION).not_done)
        while not ticks.empty():
            tick(ticks.get())
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
