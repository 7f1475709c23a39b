"""Parallel runs: the same results as sequential ones, in order, and errors of workers; sweeps that were killed.

partner of: eval/sweep.py
"""

import os
import socket
import sys
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType

import pytest

from vcsd_eval.partial_results import ResultCache
from vcsd_eval.sweep import cores, sweep, sweep_on_ray, sweep_rest


@pytest.fixture(autouse=True)
def found_by_workers(monkeypatch):
    """Workers import what they work with from here."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def squared(number, tick):
    tick(None)
    if number < 0:
        raise ValueError(f"{number} is negative")
    tick(None)
    return number * number


def killed(number, tick):
    os._exit(1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_sweep_keeps_order_and_ticks_each_part(jobs):
    ticks = []
    assert sweep(squared, [3, 1, 2], jobs, ticks.append) == [9, 1, 4]
    assert len(ticks) == 6


@pytest.mark.parametrize("jobs", [1, 2])
def test_worker_error_is_raised_in_caller(jobs):
    with pytest.raises(ValueError, match="-1 is negative"):
        sweep(squared, [1, -1, 2], jobs)


def test_killed_worker_is_one_line_error():
    with pytest.raises(ChildProcessError, match="a worker died"):
        sweep(killed, [1, 2], 2)


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_are_reported_as_they_finish(jobs):
    told = []
    with pytest.raises(ValueError, match="-1 is negative"):
        sweep(squared, [3, 2, -1], jobs, done=lambda number, result: told.append((number, result)))
    assert {(0, 9), (1, 4)} == set(told) if jobs == 1 else set(told) <= {(0, 9), (1, 4)}
    told.clear()
    sweep(squared, [3, 1, 2], jobs, done=lambda number, result: told.append((number, result)))
    assert sorted(told) == [(0, 9), (1, 1), (2, 4)]


def rest(path, items, asked):
    """Sweep the items missing from `path`; `asked` is called with them."""

    def compute(left, done):
        asked.extend(left)
        sweep(squared, left, done=done)

    return sweep_rest(items, ResultCache(path), compute, lambda result: [result], lambda stored: stored[0])


def test_rest_computes_only_missing_parts(tmp_path):
    path, asked = tmp_path / "kept.jsonl", []
    with pytest.raises(ValueError, match="-1 is negative"):
        rest(path, [3, 2, -1, 5], asked)
    asked.clear()
    assert rest(path, [5, 3, 2], asked) == [25, 9, 4]
    assert asked == [5]
    asked.clear()
    assert rest(path, [5, 3, 2, 5.0], asked) == [25, 9, 4, 25]
    assert asked == [5.0]  # equal, yet another input


def test_number_of_cores_is_at_least_1():
    assert cores() >= 1


class Reference:
    """As Ray's: has a future."""

    def __init__(self, function, given):
        self._done = Future()
        try:
            self._done.set_result(function(*given))
        except Exception as error:  # noqa: BLE001 - raised by the caller of result()
            self._done.set_exception(error)

    def future(self):
        return self._done


class Remote:
    def __init__(self, function):
        self.function = function

    def remote(self, *given):
        return Reference(self.function, given)


@pytest.fixture
def fake_ray(monkeypatch):
    """What `sweep_on_ray` needs of Ray, in this process."""
    ray, util, queue = (ModuleType(name) for name in ("ray", "ray.util", "ray.util.queue"))
    ray.calls = []

    def init(address, **options):
        ray.calls.append(address)
        if address == "local-but-dead":
            raise ConnectionError("Could not find any running Ray instance.\nMore about that.")

    ray.init, ray.remote, ray.shutdown = init, Remote, lambda: ray.calls.append("shutdown")
    queue.Queue = lambda actor_options: SimpleQueue()
    for module in (ray, util, queue):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return ray


def test_sweep_on_cluster_gives_same_results(fake_ray):
    ticks, told = [], {}
    assert sweep_on_ray(squared, [3, 1, 2], "auto", ticks.append, told.__setitem__) == [9, 1, 4]
    assert told == {0: 9, 1: 1, 2: 4}
    assert len(ticks) == 6 and fake_ray.calls == ["auto", "shutdown"]
    with pytest.raises(ValueError, match="-1 is negative"):
        sweep_on_ray(squared, [1, -1], "auto")
    assert fake_ray.calls[-1] == "shutdown"


def test_missing_cluster_is_one_line_error(fake_ray):
    with pytest.raises(ValueError, match="ray = 'local-but-dead': Could not find any running Ray instance") as raised:
        sweep_on_ray(squared, [1], "local-but-dead")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_address_without_listener_fails_at_once(fake_ray, scheme):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert sweep_on_ray(squared, [3], f"{scheme}127.0.0.1:{port}") == [9]
    before = len(fake_ray.calls)
    with pytest.raises(ValueError, match=f"ray = '{scheme}127.0.0.1:{port}': .*refused"):
        sweep_on_ray(squared, [3], f"{scheme}127.0.0.1:{port}")
    assert len(fake_ray.calls) == before


def test_missing_ray_error_has_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--ray needs the package ray: pip install 'vcsd\[ray\]'"):
        sweep_on_ray(squared, [1], "auto")


def test_sweep_on_local_ray_cluster_works(ray_cluster):
    ticks = []
    assert sweep_on_ray(squared, [3, 1, 2], "local", ticks.append) == [9, 1, 4]
    assert len(ticks) == 6
