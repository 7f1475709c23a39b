"""The rules that policies consist of."""

from serving.tiered.machine import Tier
from serving.tiered.policies import FLASH_WINDOW, POLICIES, by_last_use, by_next_use, by_uses, due, in_windows, rotate
from serving.tiered.server import STAY
from tests.serving.tiered.test_server import server


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
