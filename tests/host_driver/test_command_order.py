"""Threads take turns in a fixed order, independent of their speed."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from host_driver.command_order import CommandOrder, OrderBrokenError
from tests.served import HANG_S


def test_micro_batches_alternate():
    order, seen = CommandOrder(3), []

    def walk(number):
        for _ in range(5):
            time.sleep(0.001 * number)
            with order.turn(number):
                seen.append(number)
        order.leave(number, failed=False)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(walk, [2, 0, 1]))
    assert seen == [0, 1, 2] * 5


def test_finished_micro_batch_is_not_waited_for():
    order = CommandOrder(2)
    order.leave(0, failed=False)
    for _ in range(3):
        with order.turn(1):
            pass


def test_failed_micro_batch_wakes_the_others():
    order = CommandOrder(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(order.turn(1).__enter__)
        order.leave(0, failed=True)
        with pytest.raises(OrderBrokenError):
            waiting.result(timeout=HANG_S)
