"""Owner numbers for tags: none is reused while any sequence has pages of it."""

import pytest

from ftl import OutOfSpaceError
from ftl.flash.tag import MAX_OWNERS
from ftl.kv.owners import Owners


def test_owner_number_is_freed_by_last_sharer():
    owners = Owners()
    first = owners.new(1, writes=10)
    owners.share([first], 2)
    owners.release([first], 1)
    assert owners.sequences([first]) == {2} and owners.first_write[first] == 10
    owners.release([first], 2)
    assert owners.sequences([first]) == set() and first not in owners.first_write


def test_owner_numbers_wrap_and_skip_used_ones():
    owners = Owners()
    first = owners.new(1, 0)
    owners.next = MAX_OWNERS - 1
    assert [owners.new(2, 0), owners.new(3, 0)] == [MAX_OWNERS - 1, first + 1]


def test_exhausted_owner_numbers_are_refused(monkeypatch):
    monkeypatch.setattr("ftl.kv.owners.MAX_OWNERS", 2)
    owners = Owners()
    assert [owners.new(1, 0), owners.new(2, 0)] == [0, 1]
    with pytest.raises(OutOfSpaceError, match="all 2 owner numbers"):
        owners.new(3, 0)
    owners.release([0], 1)
    assert owners.new(3, 0) == 0


def test_restored_owner_numbers_are_in_use():
    owners = Owners()
    for handle in (5, 6):
        owners.restore(3, 77, handle)
    owners.next = 3
    assert owners.new(9, 100) == 4
    assert owners.sequences([3, 4]) == {5, 6, 9}
