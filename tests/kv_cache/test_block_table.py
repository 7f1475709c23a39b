"""The rules of the block table, against a model of plain dictionaries, under random policies."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_cache.block_table import BlockKey, BlockTable, CopyRange, PolicyError
from kv_cache.hardware import DEVICE, DIRECT, HOST, Tier
from tests.properties import examples

ROW = 4
LIMITS = {DEVICE: 10 * ROW, HOST: 6 * ROW, DIRECT: None}
EXTENTS = [BlockKey(request, layer, part) for request in "ab" for layer in (0, 1) for part in "kv"]


@dataclass(eq=False)
class Copying:
    """A copy under way, ended by the test."""

    copy_range: CopyRange
    done: bool = False
    failed: bool = False
    dropped: bool = False
    began_ns: int = 0
    ended_ns: int = 0
    room: dict[str, int] = field(default_factory=dict)


class Rules(RuleBasedStateMachine):
    """Any order of acts. `held`: for each block, tokens at each tier; `bytes_there`: what really occupies a tier."""

    def __init__(self) -> None:
        super().__init__()
        tiers = {name: Tier(name, limit, attends=name == DEVICE) for name, limit in LIMITS.items()}
        self.table = BlockTable(tiers)
        self.blocks_at: dict[BlockKey, dict[str, int]] = {}
        self.going: list[Copying] = []
        self.leaving: list[tuple[str, int, list[Copying]]] = []
        self.attended: set[BlockKey] = set()

    def total(self, block: BlockKey) -> int:
        return max(self.blocks_at[block].values())

    def used(self, tier: str) -> int:
        return ROW * sum(copies.get(tier, 0) for copies in self.blocks_at.values())

    def fits(self, tier: str, tokens: int) -> bool:
        limit = LIMITS[tier]
        return limit is None or self.used(tier) + tokens * ROW <= limit

    def really_fits(self, tier: str, waits: list[Copying]) -> None:
        """Check that resident bytes, and those still leaving after the awaited copies have finished, are within the
        limit.
        """
        limit = LIMITS[tier]
        still = sum(size for where, size, whose in self.leaving if where == tier and self.blocks(whose, waits))
        assert limit is None or self.used(tier) + still <= limit

    @staticmethod
    def blocks(whose: list[Copying], waits: list[Copying]) -> bool:
        return any(not transfer.done and transfer not in waits for transfer in whose)

    @rule(block=st.sampled_from(EXTENTS), tier=st.sampled_from(list(LIMITS)), tokens=st.integers(0, 4))
    def add(self, block: BlockKey, tier: str, tokens: int) -> None:
        if block in self.blocks_at or not self.fits(tier, tokens):
            with pytest.raises(PolicyError):
                self.table.add(block, ROW, tier, tokens)
            return
        waits = self.table.add(block, ROW, tier, tokens)
        self.blocks_at[block] = {tier: tokens}
        self.really_fits(tier, waits)

    @rule(block=st.sampled_from(EXTENTS), tier=st.sampled_from(list(LIMITS)), tokens=st.integers(1, 3))
    def grow(self, block: BlockKey, tier: str, tokens: int) -> None:
        copies = self.blocks_at.get(block)
        if copies is None or copies.get(tier, -1) != self.total(block) or not self.fits(tier, tokens):
            with pytest.raises(PolicyError):
                self.table.grow(block, tier, tokens)
            return
        waits = self.table.grow(block, tier, tokens)
        copies[tier] += tokens
        self.really_fits(tier, waits)

    @rule(
        blocks=st.dictionaries(st.sampled_from(EXTENTS), st.integers(1, 3), min_size=1),
        tier=st.sampled_from(list(LIMITS)),
    )
    def grow_in_place(self, blocks: dict[BlockKey, int], tier: str) -> None:
        held = [copies for block in blocks if (copies := self.blocks_at.get(block))]
        whole = all(copies.get(tier, -1) == max(copies.values()) for copies in held)
        moves = any(self.arriving(block, tier) for block in blocks) or any(
            where == tier and self.blocks(whose, []) for where, _, whose in self.leaving
        )
        elsewhere = any(self.used(name) for name in LIMITS if name != tier)
        fits = self.fits(tier, sum(blocks.values()))
        possible = whole and not (moves or elsewhere or blocks.keys() & self.attended) and fits
        assert self.table.grow_in_place({block: (n, ROW) for block, n in blocks.items()}, tier, 7) == possible
        for block, tokens in blocks.items() if possible else ():
            copies = self.blocks_at.setdefault(block, {tier: 0})
            copies[tier] += tokens

    @rule(block=st.sampled_from(EXTENTS), source=st.sampled_from(list(LIMITS)), to=st.sampled_from(list(LIMITS)))
    def copy(self, block: BlockKey, source: str, to: str) -> None:
        copies = self.blocks_at.get(block)
        if source == to:
            return
        allowed = copies is not None and copies.get(source, -1) == self.total(block) and block not in self.attended
        if not allowed or not self.fits(to, self.total(block) - self.blocks_at[block].get(to, 0)):
            with pytest.raises(PolicyError):
                self.table.copy(block, source, to)
            return
        before = self.blocks_at[block].get(to, 0)
        copy_range = self.table.copy(block, source, to)
        assert (copy_range.first, copy_range.tokens) == (before, self.total(block) - before)
        self.blocks_at[block][to] = self.total(block)
        self.really_fits(to, list(copy_range.after))
        assert set(copy_range.needs) == self.arriving(block, source) | self.arriving(block, to)
        transfer = Copying(copy_range)
        self.table.start_copy(copy_range, transfer)
        self.going.append(transfer)

    def arriving(self, block: BlockKey, tier: str) -> set[Copying]:
        """Copies that bring tokens to a block's present copy in a tier."""
        ranges = [transfer for transfer in self.going if not transfer.done and not transfer.dropped]
        return {t for t in ranges if (t.copy_range.block, t.copy_range.target) == (block, tier)}

    @rule(block=st.sampled_from(EXTENTS), tokens=st.integers(0, 6))
    def crop(self, block: BlockKey, tokens: int) -> None:
        """Crops shorten copies that have more tokens, and leave the others alone."""
        copies = self.blocks_at.get(block)
        moving = any(t.copy_range.block == block and not t.done for t in self.going)
        if copies is None or moving:
            return
        self.table.crop(block, tokens)
        for tier, held in copies.items():
            copies[tier] = min(held, tokens)
            assert self.table[block].copies[tier].tokens == copies[tier]

    @rule(block=st.sampled_from(EXTENTS), tier=st.sampled_from(list(LIMITS)))
    def drop(self, block: BlockKey, tier: str) -> None:
        copies = self.blocks_at.get(block)
        whole = [] if copies is None else [name for name in copies if copies[name] == self.total(block)]
        if copies is None or tier not in copies or whole == [tier] or block in self.attended:
            with pytest.raises(PolicyError):
                self.table.drop(block, tier)
            return
        self.leave(block, tier)
        self.table.drop(block, tier)

    def leave(self, block: BlockKey, tier: str) -> None:
        whose = [
            transfer
            for transfer in self.going
            if transfer.copy_range.block == block
            and tier in (transfer.copy_range.source, transfer.copy_range.target)
            and not transfer.done
        ]
        for transfer in whose:
            transfer.dropped |= transfer.copy_range.target == tier
        self.leaving.append((tier, self.blocks_at[block].pop(tier) * ROW, whose))

    @rule(block=st.sampled_from(EXTENTS))
    def attend(self, block: BlockKey) -> None:
        copies = self.blocks_at.get(block)
        if copies is None or copies.get(DEVICE, -1) != self.total(block):
            with pytest.raises(PolicyError):
                self.table.attend([block], DEVICE, 0)
            return
        waits = self.table.attend([block], DEVICE, 0)
        arriving = [
            t for t in self.going if t.copy_range.block == block and t.copy_range.target == DEVICE and not t.done
        ]
        assert set(arriving) >= set(waits)
        if block in self.attended:
            self.table.end_attention([block])
        self.attended.add(block)

    @rule()
    def attended_no_longer(self) -> None:
        self.table.end_attention(self.attended)
        self.attended.clear()

    @rule()
    def oldest_ends(self) -> None:
        for transfer in self.going[:1]:
            assert all(before.done for before in transfer.copy_range.after), "it waits for one that is younger"
            transfer.done = True
            self.going.remove(transfer)

    @rule(request=st.sampled_from("ab"))
    def free(self, request: str) -> None:
        if any(block.request == request for block in self.attended):
            return
        for block in [block for block in self.blocks_at if block.request == request]:
            for tier in list(self.blocks_at[block]):
                self.leave(block, tier)
            del self.blocks_at[block]
        self.table.free(request)

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        for tier in LIMITS:
            assert self.table.used[tier] == self.used(tier)
        for block, copies in self.blocks_at.items():
            assert set(self.table.tiers_of(block)) == {p for p in copies if copies[p] == self.total(block)}


TestRules = Rules.TestCase
TestRules.settings = settings(max_examples=examples(60), stateful_step_count=60)


def test_refused_operation_gives_reason() -> None:
    table = BlockTable({DEVICE: Tier(DEVICE, 8, attends=True), HOST: Tier(HOST)})
    x = BlockKey("r", 3, "v")
    table.add(x, 4, DEVICE, 2)
    with pytest.raises(PolicyError, match="v of request r, layer 3: device has the last whole copy"):
        table.drop(x, DEVICE)
    with pytest.raises(PolicyError, match="device is full: 4 bytes are wanted, 0 of 8 are free"):
        table.grow(x, DEVICE, 1)
    with pytest.raises(PolicyError, match="there is no tier 'tape': there are device, host"):
        table.copy(x, DEVICE, "tape")
    with pytest.raises(PolicyError, match="host does not attend"):
        table.attend([x], HOST, 0)
    table.attend([x], DEVICE, 0)
    with pytest.raises(PolicyError, match="is attended: it cannot move now"):
        table.copy(x, DEVICE, HOST)


def test_only_missing_bytes_are_copied_again() -> None:
    table = BlockTable({DEVICE: Tier(DEVICE, attends=True), HOST: Tier(HOST)})
    x = BlockKey("r", 0)
    table.add(x, 4, DEVICE, 10)
    assert table.copy(x, DEVICE, HOST).tokens == 10
    table.grow(x, DEVICE, 3)
    assert table.tiers_of(x) == (DEVICE,)
    again = table.copy(x, DEVICE, HOST)
    assert (again.first, again.tokens) == (10, 3)


def test_copy_waits_for_readers_of_its_target() -> None:
    table = BlockTable({name: Tier(name, attends=name == DEVICE) for name in (DEVICE, HOST, DIRECT)})
    x = BlockKey("r", 0)
    table.add(x, 4, HOST, 10)
    up = table.copy(x, HOST, DEVICE)
    table.start_copy(up, Copying(up, done=True))
    away = table.copy(x, DEVICE, DIRECT)
    reading = Copying(away)
    table.start_copy(away, reading)
    table.grow(x, HOST, 1)
    again = table.copy(x, HOST, DEVICE)
    assert (again.after, again.needs) == ((reading,), ())


def test_crop_and_rewrite_invalidate_copies() -> None:
    table = BlockTable({DEVICE: Tier(DEVICE, attends=True), HOST: Tier(HOST)})
    x = BlockKey("r", 0)
    table.add(x, 4, DEVICE, 10)
    table.copy(x, DEVICE, HOST)
    table.crop(x, 6)
    assert (table.used[DEVICE], table.used[HOST], table[x].tokens) == (24, 24, 6)
    table.drop_stale_copies(x, DEVICE)
    assert table.tiers_of(x) == (DEVICE,) and table.used[HOST] == 0


def test_crop_adds_no_tokens_to_a_partial_copy() -> None:
    table = BlockTable({DEVICE: Tier(DEVICE, attends=True), HOST: Tier(HOST)})
    x = BlockKey("r", 0)
    table.add(x, 4, DEVICE, 4)
    table.copy(x, DEVICE, HOST)
    table.grow(x, DEVICE, 8)
    table.crop(x, 8)
    assert (table[x].copies[HOST].tokens, table.used[HOST], table.used[DEVICE]) == (4, 16, 32)
    assert table.tiers_of(x) == (DEVICE,)
    again = table.copy(x, DEVICE, HOST)
    assert (again.first, again.tokens) == (4, 4)


def test_copies_and_selections_need_what_still_arrives_at_their_source() -> None:
    table = BlockTable({name: Tier(name, attends=name == DEVICE) for name in (DEVICE, HOST, DIRECT)})
    x = BlockKey("r", 0)
    table.add(x, 4, DIRECT, 4)
    up = table.copy(x, DIRECT, HOST)
    arriving = Copying(up)
    table.start_copy(up, arriving)
    selected = table.select(x, HOST, DEVICE, 2)
    assert (selected.needs, selected.after) == ((arriving,), (arriving,))
    further = table.copy(x, HOST, DEVICE)
    assert (further.needs, further.after) == ((arriving,), (arriving,))
    table.start_copy(further, Copying(further, done=True))
    table.grow(x, DIRECT, 1)
    rest = table.copy(x, DIRECT, HOST)
    assert (rest.first, rest.needs, rest.after) == (4, (arriving,), (arriving,))  # of what is at the target, too
    arriving.done = True
    assert table.copy(x, HOST, DEVICE).needs == ()


@pytest.mark.parametrize("ends", ["attention", "free"])
def test_room_of_a_selection_is_given_back_once(ends: str) -> None:
    table = BlockTable({DEVICE: Tier(DEVICE, 40, attends=True), HOST: Tier(HOST)})
    x = BlockKey("r", 0)
    table.add(x, 4, HOST, 10)
    selected = table.select(x, HOST, DEVICE, 6)
    assert (selected.tokens, table.used[DEVICE]) == (6, 24)
    table.start_select(selected, Copying(selected, done=True))
    table.check()
    with pytest.raises(PolicyError, match="is full"):
        table.add(BlockKey("s", 0), 4, DEVICE, 5)
    if ends == "attention":
        table.attend([x], DEVICE, 0)
        assert table.used[DEVICE] == 24
        table.end_attention([x])
    else:
        table.free("r")
    table.check()
    assert table.used[DEVICE] == 0 and table.used[HOST] == (40 if ends == "attention" else 0)


def test_a_copy_that_failed_stays_missing_until_it_is_dropped() -> None:
    table = BlockTable({DEVICE: Tier(DEVICE, attends=True), HOST: Tier(HOST)})
    x = BlockKey("r", 0)
    table.add(x, 4, HOST, 10)
    copy_range = table.copy(x, HOST, DEVICE)
    broken = Copying(copy_range, done=True, failed=True)
    table.start_copy(copy_range, broken)
    assert table.attend([x], DEVICE, 0) == [broken]
    table.end_attention([x])
    table.grow(x, DEVICE, 1)
    back = table.copy(x, DEVICE, HOST)
    assert back.needs == (broken,)
    table.start_copy(back, Copying(back, done=True, failed=True))
    assert table.attend([x], DEVICE, 1) == [broken]


def test_copy_waits_for_eviction_but_does_not_need_it() -> None:
    """If the eviction failed, the copy would not fail."""
    table = BlockTable({DEVICE: Tier(DEVICE, 40, attends=True), HOST: Tier(HOST)})
    x, y = BlockKey("r", 0), BlockKey("s", 0)
    table.add(x, 4, DEVICE, 10)
    table.add(y, 4, HOST, 10)
    down = table.copy(x, DEVICE, HOST)
    leaving = Copying(down)
    table.start_copy(down, leaving)
    table.drop(x, DEVICE)
    up = table.copy(y, HOST, DEVICE)
    assert (up.after, up.needs) == ((leaving,), ())


def test_failed_start_of_copy_changes_no_accounting() -> None:
    table = BlockTable({DEVICE: Tier(DEVICE, attends=True), HOST: Tier(HOST, 100)})
    x = BlockKey("r", 0)
    table.add(x, 4, DEVICE, 10)
    table.cancel_copy(table.copy(x, DEVICE, HOST))
    assert table.tiers_of(x) == (DEVICE,) and table.used[HOST] == 0
    begun = table.copy(x, DEVICE, HOST)
    table.start_copy(begun, Copying(begun, done=True))
    table.grow(x, DEVICE, 3)
    table.cancel_copy(table.copy(x, DEVICE, HOST))
    assert table.used[HOST] == 40 and table.copy(x, DEVICE, HOST).first == 10
    table.check()


def test_exactly_free_space_is_not_waited_for():
    table = BlockTable({name: Tier(name, limit, attends=name == DEVICE) for name, limit in LIMITS.items()})
    leaves = Copying(CopyRange(EXTENTS[0], DEVICE, DIRECT, 0, 6, ROW, (), ()))
    table._leaving[DEVICE].append((6 * ROW, [leaves]))
    assert table._take(DEVICE, 4 * ROW) == []
    assert table._take(DEVICE, 1) == [leaves]


@pytest.mark.parametrize(
    "state", ["", "new", "elsewhere", "arrives", "failed", "leaves", "attended", "partial", "full"]
)
def test_blocks_grow_in_place_only_if_nothing_moves(state: str) -> None:
    table = BlockTable({name: Tier(name, 8 * ROW, attends=True) for name in (DEVICE, HOST)})
    block, other = EXTENTS[0], EXTENTS[1]
    table.add(block, ROW, DEVICE, 6)
    match state:
        case "elsewhere":
            table.add(other, ROW, HOST, 1)
        case "arrives" | "failed":
            table.add(other, ROW, HOST, 1)
            copy_range = table.copy(other, HOST, DEVICE)
            table.start_copy(copy_range, Copying(copy_range, done=state == "failed", failed=state == "failed"))
            table.drop(other, HOST)
        case "leaves":
            table.add(other, ROW, DEVICE, 1)
            copy_range = table.copy(other, DEVICE, HOST)
            table.start_copy(copy_range, Copying(copy_range))
            table.free(other.request)
            table.add(block, ROW, DEVICE, 6)
        case "attended":
            table.attend([block], DEVICE, 0)
        case "partial":
            copy_range = table.copy(block, DEVICE, HOST)
            table.start_copy(copy_range, Copying(copy_range, done=True))
            table.grow(block, HOST, 1)
            table.used[HOST] = 0
    blocks = {block: (3 if state == "full" else 1, ROW)}
    blocks |= {other: (1, ROW)} if state in ("new", "arrives", "failed") else {}
    before, possible = table[block].tokens, state in ("", "new")
    assert table.grow_in_place(blocks, DEVICE, 7) == possible
    assert (table[block].tokens, table[block].used) == ((7, 7) if possible else (before, 0))
    if state == "new":
        assert (table[other].tokens, table.tiers_of(other), table.used[DEVICE]) == (1, (DEVICE,), 8 * ROW)
