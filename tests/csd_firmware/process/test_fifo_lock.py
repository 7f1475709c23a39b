"""The request that has waited longest is served next."""

from __future__ import annotations

import threading

from csd_firmware.process.fifo_lock import FifoLock
from tests.served import until


def test_fifo_lock_serves_waiters_in_order() -> None:
    turns, order, inside = FifoLock(), list[int](), list[int]()

    def enter(number: int) -> None:
        with turns:
            inside.append(number)
            order.append(number)
            assert inside == [number]
            inside.pop()

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(20)]
    with turns:
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            until(lambda waiting=waiting: len(turns._waiting) == waiting)
        assert not order
    for thread in threads:
        thread.join()
    assert order == list(range(20))
    with turns:
        pass


def test_fifo_lock_owner_requeues_after_waiters() -> None:
    """A plain lock goes to the thread that asks again at once, as often as it does."""
    turns, order = FifoLock(), list[str]()

    def other() -> None:
        with turns:
            order.append("other")

    thread = threading.Thread(target=other)
    with turns:
        thread.start()
        until(lambda: len(turns._waiting) == 1)
    with turns:
        order.append("again")
    thread.join()
    assert order == ["other", "again"]
