"""The rules that policies consist of.

partner of: kv_cache/policies/tierkv.py
"""

from types import SimpleNamespace

import pytest

from kv_cache.policies.tierkv import FLASH_WINDOW, Lfu, Mended, Rotating, TierKv
from kv_cache.policies.time_slices import STAY
from kv_cache.transfer.sequences import Level
from tests.kv_cache.policies.time_slice_setup import waiting


def test_victims_by_rule():
    one = waiting("static", 3, Level.HOST)
    a, b, c = one.queue
    for kv, used, uses in ((a, 7, 1), (b, 3, 5), (c, 5, 2)):
        kv.used, kv.uses = used, uses
    assert list(Rotating.victims(one, Level.HOST, a)) == [b, c, a]
    assert list(Lfu.victims(one, Level.HOST, a)) == [a, c, b]
    assert list(Mended.victims(one, Level.HOST, a)) == [c, b]
    assert list(Mended.victims(one, Level.HOST, c)) == []
    assert list(Rotating.victims(one, Level.FLASH, a)) == []
    c.level = Level.DEVICE
    assert list(Mended.victims(one, Level.HOST, a)) == [b]


def test_device_evicts_requests_decoded_long_enough():
    one = waiting("mended", 2, Level.DEVICE)
    one.enter_next()
    first, second = one.active
    (cause,) = waiting("mended", 1, Level.HOST).queue
    first.turn = second.turn = one.slice_tokens
    assert list(Mended.victims(one, Level.DEVICE, cause)) == []
    one.store.now_s = 1.1 * STAY * one.iteration_s
    second.entered_s = one.store.now_s
    assert list(Mended.victims(one, Level.DEVICE, cause)) == [first]


def test_rotation_waits_for_entering_requests():
    one = waiting("static", 2, Level.FLASH)
    one.enter_next()
    assert all(kv.is_here for kv in one.active)
    assert one.counts.stalled_s == one.store.now_s > 0


def test_due_requests_follow_from_slices_and_ends():
    one = waiting("tierkv", 3, Level.DEVICE)
    one.limit = 40_000
    one.enter_next()
    assert [len(one.active), len(one.queue)] == [2, 1]
    one.active[0].turn = 2
    assert list(TierKv.due(one, 2)) == []
    assert list(TierKv.due(one, FLASH_WINDOW)) == [(3, one.queue[0])]


def test_prefetch_window_considers_one_request_alone():
    """Two requests that arrive together would each meet the deadline alone; both are started, though together they are
    late.
    """
    one = waiting("tierkv", 2, Level.HOST, host_bytes_per_s=20_000 / 0.029)
    (decoding,) = waiting("tierkv", 1, Level.DEVICE).queue
    decoding.room = one.limit = 40_000
    one.store.free[Level.DEVICE] -= decoding.room
    one.queue.insert(0, decoding)
    one.enter(decoding)
    decoding.turn = 3
    one.copy_ahead()
    assert [bool(kv.move) for kv in one.queue] == [False, False]
    decoding.turn = 2
    one.copy_ahead()
    assert [bool(kv.move) for kv in one.queue] == [True, True]


class Queue:
    """A server with one request in the queue, which is in host memory. asked: acts of the policies."""

    limit, active_bytes, active, slice_tokens, iteration_s = 100, 0, (), 4, 1.0

    def __init__(self, sooner, use):
        self.kv = SimpleNamespace(room=10, move=None, level=Level.HOST, tokens=1)
        self.queue, self.asked = [self.kv], []
        levels = SimpleNamespace(copy_s=lambda link, nbytes: 0.5, bytes_of=lambda tokens: tokens)
        self.store = SimpleNamespace(waiting=(), levels=levels)
        self.recompute_is_faster, self.link_utilization = lambda kv, level: sooner, lambda link: use

    def due(self, window):
        return TierKv.due(self, window)

    def drop_for_recompute(self, kv):
        self.asked.append("give up")

    def request_copy(self, kv, level, place):
        self.asked.append(level)
        return True


@pytest.mark.parametrize(("sooner", "asked"), [(False, [Level.DEVICE]), (True, ["give up", Level.DEVICE])])
def test_kv_cache_read_faster_than_recomputed_is_kept(sooner, asked):
    queue = Queue(sooner, 0.0)
    Mended.copy_ahead(queue)
    assert queue.asked == asked


@pytest.mark.parametrize("use", [0.0, 1.0])
def test_next_request_is_prefetched_on_busy_link(use):
    queue = Queue(False, use)
    TierKv.copy_ahead(queue)
    assert queue.asked == [Level.DEVICE]
