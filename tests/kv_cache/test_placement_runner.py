"""partner of: kv_cache/placement_runner.py"""

from __future__ import annotations

import random

import pytest

from kv_cache import (
    CSD,
    DEVICE,
    DIRECT,
    HOST,
    Iteration,
    IterationRunner,
    Machine,
    PolicyError,
    Route,
    SharedLink,
    Tier,
)
from kv_cache.block_table import BlockKey
from kv_cache.iteration import TierAssignment
from kv_cache.placement_runner import PlacementRunner
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

LAYERS, ROW = 4, 8
PATHS = ((HOST, DEVICE), (DEVICE, HOST), (DIRECT, DEVICE), (DEVICE, DIRECT), (HOST, DIRECT), (DIRECT, HOST))
DRIVES = ((DEVICE, CSD), (CSD, DEVICE), (HOST, CSD), (CSD, HOST))


def machine(device: int | None = None, host: int | None = None) -> Machine:
    tiers = [Tier(DEVICE, device, attends=True), Tier(HOST, host), Tier(DIRECT), Tier(CSD, attends=True)]
    routes = {(a, b): Route(f"{a}>{b}", ("bus",)) for a, b in PATHS + DRIVES}
    return Machine.of(tiers, [SharedLink("bus", 1e9)], routes)


def served(device: int | None = None, host: int | None = None):  # type: ignore[no-untyped-def]
    """A run, and where each iteration attended what: (row, layer) to tiers."""
    attended: list[dict[tuple[object, int], tuple[str, ...]]] = []

    def compute(attention):  # type: ignore[no-untyped-def]
        attended[-1].update(((row, attention.layer), attention.tiers) for row in attention.rows)
        return LayerTime(10)

    def policy(it: Iteration) -> None:
        attended.append({})
        PlacementRunner(it).run()

    one = machine(device, host)
    run = IterationRunner(one, range(LAYERS), policy, SimulatedTransfers(one, compute), parts=("kv",))
    return run, attended


def iteration(run: IterationRunner, tiers, buffers: int = 2, **new: int) -> None:  # type: ignore[no-untyped-def]
    """Run an iteration. tiers: of each block of a layer of a request."""
    run.run(new, dict.fromkeys(new, ROW), TierAssignment(tiers, lambda request: buffers))
    run.table.check()


def test_rows_of_layer_in_different_tiers_are_attended() -> None:
    homes = {"a": (DEVICE,), "b": (HOST,), "c": (CSD,), "d": (DIRECT,)}
    run, attended = served()
    for row in homes:
        iteration(run, lambda row, layer: homes[row], **{row: 5})
    iteration(run, lambda row, layer: homes[row], a=1, b=1, c=1, d=1)
    assert all(attended[-1][row, 2] == ((CSD,) if row == "c" else (DEVICE,)) for row in homes)
    for block, entry in run.table.entries.items():
        assert run.table.tiers_of(block) == homes[str(block.request)] and entry.tokens == 6
    assert run.traffic["device>csd"].bytes == 5 * LAYERS * ROW  # the last token was created there


def test_row_in_two_blocks_attends_both_tiers() -> None:
    run, attended = served()
    for new in (6, 3, 1):  # the second begins the second block
        iteration(run, lambda row, layer: (DEVICE, CSD), a=new)
    assert attended[-2]["a", 0] == (DEVICE, DEVICE) and attended[-1]["a", 0] == (DEVICE, CSD)
    lengths = {(block.layer, block.index): entry.tokens for block, entry in run.table.entries.items()}
    assert lengths == {(layer, block): (6, 4)[block] for layer in range(LAYERS) for block in (0, 1)}
    assert run.table.used[DEVICE] == 6 * LAYERS * ROW


def test_a_block_that_is_not_the_last_is_never_in_drives() -> None:
    run, attended = served()
    for new, tiers in ((4, (DEVICE, DEVICE)), (4, (DEVICE, DEVICE)), (1, (CSD,))):
        iteration(run, lambda row, layer, tiers=tiers: tiers, a=new)
    assert attended[-1]["a", 0] == (DEVICE, CSD)
    where = {block.index: run.table.tiers_of(block) for block in run.table.entries if block.layer == 0}
    assert where == {0: (HOST,), 1: (CSD,)}


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_prefetch_is_limited_by_buffers(buffers: int) -> None:
    run, _ = served()
    here: list[int] = []
    attend = run.transfers.attend

    def noted(call):  # type: ignore[no-untyped-def]
        here.append(sum(DEVICE in entry.copies for entry in run.table.entries.values()))
        attend(call)

    run.transfers.attend = noted  # type: ignore[method-assign]
    iteration(run, lambda row, layer: (HOST,), buffers, a=5)
    here.clear()
    iteration(run, lambda row, layer: (HOST,), buffers, a=1)
    assert max(here) == min(buffers, LAYERS) and here[0] == min(buffers, LAYERS)


@pytest.mark.parametrize("seed", range(12))
def test_tiers_never_exceed_limits_for_random_placements(seed: int) -> None:
    draw = random.Random(seed)
    homes: dict[tuple[object, int], tuple[str, ...]] = {}
    run, _ = served(device=60 * ROW, host=draw.choice((0, 50, 500)) * ROW)
    alive: dict[str, int] = {}
    for number in range(40):
        if len(alive) < 4:
            row = f"r{number}"
            alive[row] = 0
        for block in alive:
            for layer in range(LAYERS):
                last = draw.choice((DEVICE, HOST, DIRECT, CSD))
                homes[block, layer] = draw.choice(((last,), (last,), (DEVICE, last)))
        new = draw.sample(sorted(alive), draw.randint(1, len(alive)))
        grown = {block: 1 if alive[block] else draw.randint(1, 9) for block in new}
        iteration(run, lambda row, layer: homes[row, layer], **grown)
        for block, tokens in grown.items():
            alive[block] += tokens
        for block, tokens in alive.items():
            for layer in range(LAYERS):
                blocks = [
                    entry.tokens for x, entry in run.table.entries.items() if (x.request, x.layer) == (block, layer)
                ]
                assert sum(blocks) == tokens
        gone = [block for block, tokens in alive.items() if tokens > 14]
        for block in gone:
            del alive[block]
            run.free(block)
    assert run.table.peak[DEVICE] <= 60 * ROW


def test_row_larger_than_device_is_refused() -> None:
    run, _ = served(device=4 * ROW)
    with pytest.raises(PolicyError, match="device is full"):
        iteration(run, lambda row, layer: (DEVICE,), a=5)


def test_iteration_without_assignment_is_refused() -> None:
    run, _ = served()
    with pytest.raises(PolicyError, match=r"vcsd\.serve"):
        run.run({"a": 5}, {"a": ROW})


class Room:
    """Stand-in for an iteration whose device has 100 bytes of room. Lists record the copies and sends of a policy."""

    batch, parts, layers, below = ["r"], ("k", "v"), range(2), HOST
    assignment = TierAssignment(lambda row, layer: (HOST,) if layer else (DEVICE,))

    def __init__(self) -> None:
        self.copied: list[BlockKey] = []

    def free_bytes(self, tier: str) -> int:
        return 100

    def blocks_at(self, tier: str) -> list[BlockKey]:
        return [BlockKey("r", 1), BlockKey("other", 0)]

    def blocks(self, layer: int, rows: object = None) -> list[BlockKey]:
        return [BlockKey("r", layer)]

    def tiers_of(self, block: BlockKey) -> tuple[str, ...]:
        return (HOST,) if block.layer else (DEVICE,)

    def missing_bytes(self, block: BlockKey, tier: str) -> int:
        return 60

    def new_bytes(self, row: object) -> int:
        return 10

    def has_path(self, source: str, target: str) -> bool:
        return True

    def copy(self, block: BlockKey, tier: str, urgency: float = 0) -> None:
        self.copied.append(block)


@pytest.mark.parametrize(("need", "leave"), [(100, 0), (101, 2)])
def test_nothing_is_evicted_if_block_just_fits(monkeypatch, need, leave):  # type: ignore[no-untyped-def]
    sent: list[BlockKey] = []
    monkeypatch.setattr(PlacementRunner, "_return_block", lambda runner, block, lower: sent.append(block))
    PlacementRunner(Room())._make_room(need, 0, ["r"])  # type: ignore[arg-type]  # what it asks of an iteration
    assert len(sent) == leave


@pytest.mark.parametrize(("kept", "comes"), [(20, 1), (21, 0)])
def test_next_layer_is_prefetched_if_it_just_fits(monkeypatch, kept, comes):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(PlacementRunner, "_attention_tiers", lambda runner, row, layer: (DEVICE,))
    room = Room()
    PlacementRunner(room)._prefetch_layers(0, ["r"], kept)  # type: ignore[arg-type]  # what it asks of an iteration
    assert len(room.copied) == comes
