"""The table's rules, against a model of plain dictionaries, under random policies."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from residency.machine import DEVICE, DIRECT, HOST, Place
from residency.table import Extent, Refused, Table, Transfer
from tests.properties import examples

ROW = 4
LIMITS = {DEVICE: 10 * ROW, HOST: 6 * ROW, DIRECT: None}
EXTENTS = [Extent(request, layer, part) for request in "ab" for layer in (0, 1) for part in "kv"]


@dataclass(eq=False)
class Copying:
    """A copy under way, ended by the test."""

    transfer: Transfer
    done: bool = False
    failed: bool = False
    began_ns: int = 0
    ended_ns: int = 0
    room: dict[str, int] = field(default_factory=dict)


class Rules(RuleBasedStateMachine):
    """Any order of acts. `held`: for each extent, tokens at each place; `bytes_there`: what really occupies a place."""

    def __init__(self) -> None:
        super().__init__()
        places = {name: Place(name, limit, attends=name == DEVICE) for name, limit in LIMITS.items()}
        self.table = Table(places)
        self.held: dict[Extent, dict[str, int]] = {}
        self.going: list[Copying] = []
        self.leaving: list[tuple[str, int, list[Copying]]] = []
        self.attended: set[Extent] = set()

    def total(self, extent: Extent) -> int:
        return max(self.held[extent].values())

    def used(self, place: str) -> int:
        return ROW * sum(copies.get(place, 0) for copies in self.held.values())

    def fits(self, place: str, tokens: int) -> bool:
        limit = LIMITS[place]
        return limit is None or self.used(place) + tokens * ROW <= limit

    def really_fits(self, place: str, waits: list[Copying]) -> None:
        """Once those that are waited for have ended, what is there and what still leaves is within the limit."""
        limit = LIMITS[place]
        still = sum(size for where, size, whose in self.leaving if where == place and self.blocks(whose, waits))
        assert limit is None or self.used(place) + still <= limit

    @staticmethod
    def blocks(whose: list[Copying], waits: list[Copying]) -> bool:
        return any(not ticket.done and ticket not in waits for ticket in whose)

    @rule(extent=st.sampled_from(EXTENTS), place=st.sampled_from(list(LIMITS)), tokens=st.integers(0, 4))
    def add(self, extent: Extent, place: str, tokens: int) -> None:
        if extent in self.held or not self.fits(place, tokens):
            with pytest.raises(Refused):
                self.table.add(extent, ROW, place, tokens)
            return
        waits = self.table.add(extent, ROW, place, tokens)
        self.held[extent] = {place: tokens}
        self.really_fits(place, waits)

    @rule(extent=st.sampled_from(EXTENTS), place=st.sampled_from(list(LIMITS)), tokens=st.integers(1, 3))
    def grow(self, extent: Extent, place: str, tokens: int) -> None:
        known = self.held.get(extent)
        if known is None or known.get(place, -1) != self.total(extent) or not self.fits(place, tokens):
            with pytest.raises(Refused):
                self.table.grow(extent, place, tokens)
            return
        waits = self.table.grow(extent, place, tokens)
        known[place] += tokens
        self.really_fits(place, waits)

    @rule(extent=st.sampled_from(EXTENTS), source=st.sampled_from(list(LIMITS)), to=st.sampled_from(list(LIMITS)))
    def copy(self, extent: Extent, source: str, to: str) -> None:
        known = self.held.get(extent)
        if source == to:
            return
        allowed = known is not None and known.get(source, -1) == self.total(extent) and extent not in self.attended
        if not allowed or not self.fits(to, self.total(extent) - self.held[extent].get(to, 0)):
            with pytest.raises(Refused):
                self.table.copy(extent, source, to)
            return
        before = self.held[extent].get(to, 0)
        transfer = self.table.copy(extent, source, to)
        assert (transfer.first, transfer.tokens) == (before, self.total(extent) - before)
        self.held[extent][to] = self.total(extent)
        self.really_fits(to, list(transfer.after))
        ticket = Copying(transfer)
        self.table.begun(transfer, ticket)
        self.going.append(ticket)

    @rule(extent=st.sampled_from(EXTENTS), place=st.sampled_from(list(LIMITS)))
    def drop(self, extent: Extent, place: str) -> None:
        known = self.held.get(extent)
        whole = [] if known is None else [name for name in known if known[name] == self.total(extent)]
        if known is None or place not in known or whole == [place] or extent in self.attended:
            with pytest.raises(Refused):
                self.table.drop(extent, place)
            return
        self.leave(extent, place)
        self.table.drop(extent, place)

    def leave(self, extent: Extent, place: str) -> None:
        whose = [
            ticket
            for ticket in self.going
            if ticket.transfer.extent == extent
            and place in (ticket.transfer.source, ticket.transfer.target)
            and not ticket.done
        ]
        self.leaving.append((place, self.held[extent].pop(place) * ROW, whose))

    @rule(extent=st.sampled_from(EXTENTS))
    def attend(self, extent: Extent) -> None:
        known = self.held.get(extent)
        if known is None or known.get(DEVICE, -1) != self.total(extent):
            with pytest.raises(Refused):
                self.table.attend([extent], DEVICE, 0)
            return
        waits = self.table.attend([extent], DEVICE, 0)
        arriving = [t for t in self.going if t.transfer.extent == extent and t.transfer.target == DEVICE and not t.done]
        assert set(arriving) >= set(waits)
        if extent in self.attended:
            self.table.attended([extent])
        self.attended.add(extent)

    @rule()
    def attended_no_longer(self) -> None:
        self.table.attended(self.attended)
        self.attended.clear()

    @rule()
    def oldest_ends(self) -> None:
        for ticket in self.going[:1]:
            assert all(before.done for before in ticket.transfer.after), "it waits for one that is younger"
            ticket.done = True
            self.going.remove(ticket)

    @rule(request=st.sampled_from("ab"))
    def free(self, request: str) -> None:
        if any(extent.request == request for extent in self.attended):
            return
        for extent in [extent for extent in self.held if extent.request == request]:
            for place in list(self.held[extent]):
                self.leave(extent, place)
            del self.held[extent]
        self.table.free(request)

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        for place in LIMITS:
            assert self.table.used[place] == self.used(place)
        for extent, copies in self.held.items():
            assert set(self.table.where(extent)) == {p for p in copies if copies[p] == self.total(extent)}


TestRules = Rules.TestCase
TestRules.settings = settings(max_examples=examples(60), stateful_step_count=60)


def test_refusals_say_why() -> None:
    table = Table({DEVICE: Place(DEVICE, 8, attends=True), HOST: Place(HOST)})
    x = Extent("r", 3, "v")
    table.add(x, 4, DEVICE, 2)
    with pytest.raises(Refused, match="v of request r, layer 3: device has the last whole copy"):
        table.drop(x, DEVICE)
    with pytest.raises(Refused, match="device is full: 4 bytes are wanted, 0 of 8 are free"):
        table.grow(x, DEVICE, 1)
    with pytest.raises(Refused, match="there is no place 'tape': there are device, host"):
        table.copy(x, DEVICE, "tape")
    with pytest.raises(Refused, match="host does not attend"):
        table.attend([x], HOST, 0)
    table.attend([x], DEVICE, 0)
    with pytest.raises(Refused, match="is attended: it cannot move now"):
        table.copy(x, DEVICE, HOST)


def test_only_what_a_place_lacks_is_copied_again() -> None:
    table = Table({DEVICE: Place(DEVICE, attends=True), HOST: Place(HOST)})
    x = Extent("r", 0)
    table.add(x, 4, DEVICE, 10)
    assert table.copy(x, DEVICE, HOST).tokens == 10
    table.grow(x, DEVICE, 3)
    assert table.where(x) == (DEVICE,)
    again = table.copy(x, DEVICE, HOST)
    assert (again.first, again.tokens) == (10, 3)


def test_a_copy_waits_for_those_who_still_read_its_target() -> None:
    table = Table({name: Place(name, attends=name == DEVICE) for name in (DEVICE, HOST, DIRECT)})
    x = Extent("r", 0)
    table.add(x, 4, HOST, 10)
    up = table.copy(x, HOST, DEVICE)
    table.begun(up, Copying(up, done=True))
    away = table.copy(x, DEVICE, DIRECT)
    reading = Copying(away)
    table.begun(away, reading)
    table.grow(x, HOST, 1)
    again = table.copy(x, HOST, DEVICE)
    assert (again.after, again.needs) == ((reading,), ())


def test_a_crop_forgets_everywhere_and_a_rewrite_elsewhere() -> None:
    table = Table({DEVICE: Place(DEVICE, attends=True), HOST: Place(HOST)})
    x = Extent("r", 0)
    table.add(x, 4, DEVICE, 10)
    table.copy(x, DEVICE, HOST)
    table.crop(x, 6)
    assert (table.used[DEVICE], table.used[HOST], table[x].tokens) == (24, 24, 6)
    table.rewritten(x, DEVICE)
    assert table.where(x) == (DEVICE,) and table.used[HOST] == 0


def test_a_copy_that_failed_stays_missing_until_it_is_dropped() -> None:
    table = Table({DEVICE: Place(DEVICE, attends=True), HOST: Place(HOST)})
    x = Extent("r", 0)
    table.add(x, 4, HOST, 10)
    transfer = table.copy(x, HOST, DEVICE)
    broken = Copying(transfer, done=True, failed=True)
    table.begun(transfer, broken)
    assert table.attend([x], DEVICE, 0) == [broken]
    table.attended([x])
    table.grow(x, DEVICE, 1)
    back = table.copy(x, DEVICE, HOST)
    assert back.needs == (broken,)
    table.begun(back, Copying(back, done=True, failed=True))
    assert table.attend([x], DEVICE, 1) == [broken]


def test_who_only_makes_room_is_not_needed() -> None:
    table = Table({DEVICE: Place(DEVICE, 40, attends=True), HOST: Place(HOST)})
    x, y = Extent("r", 0), Extent("s", 0)
    table.add(x, 4, DEVICE, 10)
    table.add(y, 4, HOST, 10)
    down = table.copy(x, DEVICE, HOST)
    leaving = Copying(down)
    table.begun(down, leaving)
    table.drop(x, DEVICE)
    up = table.copy(y, HOST, DEVICE)
    assert (up.after, up.needs) == ((leaving,), ())


def test_a_copy_that_cannot_begin_leaves_the_books_as_they_were() -> None:
    table = Table({DEVICE: Place(DEVICE, attends=True), HOST: Place(HOST, 100)})
    x = Extent("r", 0)
    table.add(x, 4, DEVICE, 10)
    table.not_begun(table.copy(x, DEVICE, HOST))
    assert table.where(x) == (DEVICE,) and table.used[HOST] == 0
    begun = table.copy(x, DEVICE, HOST)
    table.begun(begun, Copying(begun, done=True))
    table.grow(x, DEVICE, 3)
    table.not_begun(table.copy(x, DEVICE, HOST))
    assert table.used[HOST] == 40 and table.copy(x, DEVICE, HOST).first == 10
    table.check()


def test_room_that_is_free_to_the_last_byte_is_not_waited_for():
    table = Table({name: Place(name, limit, attends=name == DEVICE) for name, limit in LIMITS.items()})
    leaves = Copying(Transfer(EXTENTS[0], DEVICE, DIRECT, 0, 6, ROW, (), ()))
    table._leaving[DEVICE].append((6 * ROW, [leaves]))
    assert table._take(DEVICE, 4 * ROW) == []
    assert table._take(DEVICE, 1) == [leaves]
