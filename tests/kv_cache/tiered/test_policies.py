"""The rules that policies consist of."""

from types import SimpleNamespace

import pytest

from kv_cache.tiered.machine import Tier
from kv_cache.tiered.policies import (
    FLASH_WINDOW,
    POLICIES,
    by_last_use,
    by_next_use,
    by_uses,
    due,
    in_queue_order,
    in_windows,
    rotate,
)
from kv_cache.tiered.server import STAY
from tests.kv_cache.tiered.test_server import server


def test_victims_by_rule():
    one = server("static", 3, Tier.HOST)
    a, b, c = one.queue
    for kv, used, uses in ((a, 7, 1), (b, 3, 5), (c, 5, 2)):
        kv.used, kv.uses = used, uses
    assert list(by_last_use(one, Tier.HOST, a)) == [b, c, a]
    assert list(by_uses(one, Tier.HOST, a)) == [a, c, b]
    assert list(by_next_use(one, Tier.HOST, a)) == [c, b]
    assert list(by_next_use(one, Tier.HOST, c)) == []
    assert list(by_last_use(one, Tier.FLASH, a)) == []


def test_on_the_device_those_make_room_that_have_decoded_long_enough():
    one = server("mended", 2, Tier.DEVICE)
    POLICIES["mended"].admit(one)
    first, second = one.active
    (cause,) = server("mended", 1, Tier.HOST).queue
    first.turn = second.turn = one.slice_tokens
    assert list(by_next_use(one, Tier.DEVICE, cause)) == []
    one.store.now_s = 1.1 * STAY * one.iteration_s
    second.entered_s = one.store.now_s
    assert list(by_next_use(one, Tier.DEVICE, cause)) == [first]


def test_who_rotates_waits_for_what_enters():
    one = server("static", 2, Tier.FLASH)
    rotate(one)
    assert all(kv.is_here for kv in one.active)
    assert one.counts.stalled_s == one.store.now_s > 0


def test_what_is_due_follows_from_slices_and_ends():
    one = server("tierkv", 3, Tier.DEVICE)
    one.limit = 40_000
    rotate(one)
    assert [len(one.active), len(one.queue)] == [2, 1]
    one.active[0].turn = 2
    assert list(due(one, 2)) == []
    assert list(due(one, FLASH_WINDOW)) == [(3, one.queue[0])]


def test_a_window_is_of_one_request_alone():
    """Two requests that come at once are each in time alone, and both are begun, though together they are late."""
    one = server("tierkv", 2, Tier.HOST, host_bytes_per_s=20_000 / 0.029)
    (decoding,) = server("tierkv", 1, Tier.DEVICE).queue
    decoding.room = one.limit = 40_000
    one.store.free[Tier.DEVICE] -= decoding.room
    one.queue.insert(0, decoding)
    one.enter(decoding)
    decoding.turn = 3
    in_windows(one)
    assert [bool(kv.move) for kv in one.queue] == [False, False]
    decoding.turn = 2
    in_windows(one)
    assert [bool(kv.move) for kv in one.queue] == [True, True]


class Queue:
    """A server with one request in the queue, which is in host memory. asked: what policies did."""

    limit, active_bytes, active, slice_tokens, iteration_s = 100, 0, (), 4, 1.0

    def __init__(self, sooner, use):
        self.kv = SimpleNamespace(room=10, move=None, tier=Tier.HOST, tokens=1)
        self.queue, self.asked = [self.kv], []
        self.store = SimpleNamespace(waiting=())
        self.machine = SimpleNamespace(copy_s=lambda link, nbytes: 0.5, bytes_of=lambda tokens: tokens)
        self.computes_sooner, self.use = lambda kv, tier: sooner, lambda link: use

    def give_up(self, kv):
        self.asked.append("give up")

    def bring(self, kv, tier, place):
        self.asked.append(tier)
        return True


@pytest.mark.parametrize(("sooner", "asked"), [(False, [Tier.DEVICE]), (True, ["give up", Tier.DEVICE])])
def test_what_is_read_sooner_than_computed_is_not_given_up(sooner, asked):
    queue = Queue(sooner, 0.0)
    in_queue_order(queue)
    assert queue.asked == asked


@pytest.mark.parametrize("use", [0.0, 1.0])
def test_what_enters_next_is_brought_however_busy_its_link_is(use):
    queue = Queue(False, use)
    in_windows(queue)
    assert queue.asked == [Tier.DEVICE]
