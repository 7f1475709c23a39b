"""partner of: kv_cache/transfer/policy_thread.py"""

from __future__ import annotations

import sys
import threading

import pytest

from kv_cache.block_table import PolicyError
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.policy_thread import IterationAborted, PolicyThread


def attention(layer: int) -> AttendCall:
    return AttendCall(layer, ("r",), "device", "dense", (), ())


def iteration(conductor: PolicyThread, layers: list[int], message: list[str]):  # type: ignore[no-untyped-def]
    def run() -> None:
        for layer in layers:
            message.append(f"before {layer}")
            conductor.attend_layer(attention(layer))
            message.append(f"after {layer}")

    return run


def test_policy_and_model_take_turns() -> None:
    conductor, message = PolicyThread(), list[str]()
    for _ in range(2):
        conductor.start(iteration(conductor, [0, 1], message))
        assert conductor.enter_layer(0).layer == 0
        assert message == ["before 0"]
        conductor.enter_layer(1)
        assert message == ["before 0", "after 0", "before 1"]
        conductor.finish()
        assert message[-1] == "after 1"
        message.clear()


def test_exception_of_policy_is_raised_in_forward() -> None:
    conductor = PolicyThread()

    def breaks() -> None:
        conductor.attend_layer(attention(0))
        raise KeyError("mine")

    conductor.start(breaks)
    conductor.enter_layer(0)
    with pytest.raises(KeyError, match="mine"):
        conductor.enter_layer(1)
    conductor.start(iteration(conductor, [0], []))
    conductor.enter_layer(0)
    conductor.finish()


@pytest.mark.parametrize(
    ("layers", "reached", "reason"),
    [
        ([1], [0], "the policy attends to layer 1, the model is at layer 0"),
        ([0], [0, 1], "the policy ended its iteration, the model is at layer 1"),
    ],
)
def test_policy_out_of_layer_order_is_an_error(layers: list[int], reached: list[int], reason: str) -> None:
    conductor = PolicyThread()
    conductor.start(iteration(conductor, layers, []))
    with pytest.raises(PolicyError, match=reason):
        for layer in reached:
            conductor.enter_layer(layer)
    conductor.abandon()


def test_policy_that_attends_after_forward_is_an_error() -> None:
    conductor = PolicyThread()
    conductor.start(iteration(conductor, [0, 1], []))
    conductor.enter_layer(0)
    with pytest.raises(PolicyError, match="the policy attends to layer 1, the model has ended"):
        conductor.finish()


@pytest.mark.parametrize("reached", [0, 1])
def test_failed_forward_aborts_the_policy(reached: int) -> None:
    conductor, seen = PolicyThread(), list[str]()

    def run() -> None:
        try:
            iteration(conductor, [0, 1, 2], [])()
        except IterationAborted:
            seen.append("abandoned")
            raise

    conductor.start(run)
    for layer in range(reached):
        conductor.enter_layer(layer)
    conductor.abandon()
    assert seen == ["abandoned"]
    conductor.abandon()  # nothing is under way


def test_a_policy_that_exits_is_an_error_of_the_forward() -> None:
    conductor = PolicyThread()
    conductor.start(lambda: sys.exit(3))
    with pytest.raises(RuntimeError, match="the policy ended with SystemExit"):
        conductor.enter_layer(0)


@pytest.mark.parametrize("at", ["to_policy", "to_model"])
def test_interrupt_leaves_no_message_for_next_iteration(at: str) -> None:
    """After the message to the policy, or after its answer: neither reaches the next iteration."""
    conductor, seen = PolicyThread(), list[str]()

    class Interrupts:
        def __init__(self, queue):  # type: ignore[no-untyped-def]
            self.queue = queue

        def put(self, word):  # type: ignore[no-untyped-def]
            self.queue.put(word)
            if at == "to_policy" and word:
                raise KeyboardInterrupt

        def get(self):  # type: ignore[no-untyped-def]
            word = self.queue.get()
            if at == "to_model":
                raise KeyboardInterrupt
            return word

    conductor.start(iteration(conductor, [0, 1, 2], seen))
    conductor.enter_layer(0)
    run = conductor._run
    assert run is not None
    queue = getattr(run, at)
    if at == "to_policy":
        queue = Interrupts(queue)
        queue.get = queue.queue.get
    else:
        queue = Interrupts(queue)
    setattr(run, at, queue)
    with pytest.raises(KeyboardInterrupt):
        conductor.enter_layer(1)
    conductor.abandon()
    assert not run.thread.is_alive()
    for _ in range(2):
        conductor.start(iteration(conductor, [0, 1], seen))
        conductor.enter_layer(0)
        conductor.enter_layer(1)
        conductor.finish()


def test_endless_policy_thread_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_cache.transfer.policy_thread.PATIENCE_S", 0.05)
    conductor, over, late = PolicyThread(), threading.Event(), list[BaseException]()

    def lingers() -> None:
        over.wait()
        try:
            conductor.attend_layer(attention(0))
        except BaseException as error:  # noqa: BLE001 - asserted below
            late.append(error)

    conductor.start(lingers)
    run = conductor._run
    assert run is not None
    conductor.abandon()
    conductor.start(iteration(conductor, [0], []))
    over.set()
    run.thread.join()
    assert isinstance(late[0], IterationAborted)  # and not heard by the iteration after it
    assert conductor.enter_layer(0).layer == 0
    conductor.finish()


def test_failed_thread_start_leaves_no_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    conductor = PolicyThread()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="new thread"):
            conductor.start(iteration(conductor, [0], []))
    conductor.abandon()
    conductor.start(iteration(conductor, [0], []))
    conductor.enter_layer(0)
    conductor.finish()
