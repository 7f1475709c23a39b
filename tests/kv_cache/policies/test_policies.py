"""Every policy on machines of any size: all layers are attended, nothing is lost, no tier overflows.

partner of: kv_cache/policies/_stream.py, kv_cache/policies/dual_blade.py, kv_cache/policies/flexgen.py,
kv_cache/policies/in_storage.py, kv_cache/policies/reactive.py, kv_cache/policies/split.py,
kv_cache/policies/preload.py
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache import CSD, DEVICE, DIRECT, HOST, PAGE_CACHE, POLICIES, IterationRunner, Machine, Route, SharedLink, Tier
from kv_cache.policies import moves_blocks, policy_of
from kv_cache.policies.flexgen import FlexGen
from kv_cache.policies.reactive import make_room
from kv_cache.policies.split import Split, _spread
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers
from tests.properties import examples

ROW = 64
PROMPT, STEPS = 20, 5
LAYER = 2 * ROW * (PROMPT + STEPS)


def machine(device: int, host: int, cache: int) -> Machine:
    names = ("up", "down", "read", "write", "copy")
    tiers = [
        Tier(DEVICE, device, attends=True),
        Tier(HOST, host),
        Tier(PAGE_CACHE, cache_bytes=cache),
        Tier(DIRECT),
        Tier(CSD, attends=True),
    ]
    routes = {
        (HOST, DEVICE): Route("in", ("up",)),
        (DEVICE, HOST): Route("out", ("down",)),
        (PAGE_CACHE, DEVICE): Route("file", ("copy", "up"), miss_links=("read", "copy", "up")),
        (DEVICE, PAGE_CACHE): Route("file-out", ("down", "copy"), background=("write",)),
        (DIRECT, DEVICE): Route("direct", ("read", "up"), block_bytes=512),
        (DEVICE, DIRECT): Route("direct-out", ("down", "write"), block_bytes=512),
        (DIRECT, HOST): Route("load", ("read",), block_bytes=512),
        (HOST, DIRECT): Route("store", ("write",), block_bytes=512),
    }
    return Machine.of(tiers, [SharedLink(name, 1e9) for name in names], routes)


@settings(max_examples=examples(25))
@given(
    name=st.sampled_from(sorted(filter(moves_blocks, POLICIES))),
    layers=st.integers(1, 5),
    rows=st.integers(1, 3),
    device=st.integers(1, 6),
    host=st.integers(0, 3),
    cache=st.integers(0, 5),
)
def test_any_policy_on_any_machine(name: str, layers: int, rows: int, device: int, host: int, cache: int) -> None:
    size = rows * LAYER
    # an evicted block keeps its room while the next one is loaded
    room = max(2, device) if name == "reactive" else device
    one = machine(room * size, host * size, cache * size)
    transfers = SimulatedTransfers(one, lambda attention: LayerTime(1000, 1000 if attention.tiers == (CSD,) else 0))
    run = IterationRunner(one, range(layers), policy_of(name).layers, transfers, final_tokens=PROMPT + STEPS)
    requests = {f"r{number}": PROMPT for number in range(rows)}
    row_bytes = dict.fromkeys(requests, ROW)
    run.run(requests, row_bytes)
    for _ in range(STEPS):
        run.run(dict.fromkeys(requests, 1), row_bytes)
        run.table.check()
    transfers.settle()
    assert len(run.table.entries) == 2 * layers * rows
    assert all(entry.tokens == PROMPT + STEPS for entry in run.table.entries.values())
    assert transfers.moved == {name: counts.bytes for name, counts in run.traffic.items() if counts.bytes}
    for tier in (DEVICE, HOST):
        assert run.table.peak[tier] <= one.tiers[tier].limit_bytes


def test_reactive_moves_nothing_that_fits() -> None:
    one = machine(10 * LAYER, 0, 0)
    run = IterationRunner(
        one, range(4), policy_of("reactive").layers, SimulatedTransfers(one, lambda attention: LayerTime(1))
    )
    run.run({"r": PROMPT}, {"r": ROW})
    run.run({"r": 1}, {"r": ROW})
    assert not run.traffic


@pytest.mark.parametrize(
    ("need", "moved"), [(0, []), (4, []), (5, ["a"]), (14, ["a"]), (15, ["a", "c"]), (99, ["a", "c"])]
)
def test_reactive_evicts_until_there_is_room(need, moved) -> None:
    """Blocks of 10 bytes with 4 bytes free; `b` is of the layer that is due, the host has room for two."""
    free, evicted = {DEVICE: 4, HOST: 20}, []

    def move(block, below):
        evicted.append(block.name)
        free[DEVICE] += 10
        free[below] -= 10

    room = SimpleNamespace(
        batch={"r"},
        blocks_at=lambda tier: [SimpleNamespace(request="r", layer=i, name=name) for i, name in enumerate("abcd")],
        free_bytes=lambda tier: free.get(tier, 0),
        nbytes=lambda block: 10,
        has_path=lambda source, target: True,
        move=move,
    )
    make_room(room, DEVICE, need, keep=1)
    assert evicted == moved


def test_reactive_uses_the_host_before_the_disk() -> None:
    one = machine(2 * LAYER, 10 * LAYER, 0)
    run = IterationRunner(
        one, range(6), policy_of("reactive").layers, SimulatedTransfers(one, lambda attention: LayerTime(1))
    )
    for new in (PROMPT, 1, 1):
        run.run({"r": new}, {"r": ROW})
    assert set(run.traffic) == {"in", "out"}


def test_split_shrinks_its_cached_part_after_misses() -> None:
    """Half of K of 16 layers would be cached, but the cache keeps six: without feedback, no hits remain in the end."""
    hits = {}
    for feedback in (False, True):
        one = machine(4 * LAYER, 0, 3 * LAYER)
        transfers = SimulatedTransfers(one, lambda attention: LayerTime(1))
        run = IterationRunner(one, range(16), Split(share=0.25, feedback=feedback).layers, transfers)
        run.run({"r": PROMPT}, {"r": ROW})
        transfers.settle()
        for _ in range(STEPS):
            read, hit = transfers.page_cache_hits(PAGE_CACHE) or (0, 0)
            run.run({"r": 1}, {"r": ROW})
            transfers.settle()
        last = transfers.page_cache_hits(PAGE_CACHE)
        assert last
        hits[feedback] = (last[1] - hit) / (last[0] - read)
        run.table.check()
    assert hits[False] < 0.5
    assert hits[True] == 1


@pytest.mark.parametrize("layers", [4, 32])
def test_split_spreads_cached_layers_evenly(layers: int) -> None:
    order = _spread(range(layers))
    assert sorted(order) == list(range(layers))
    half = sorted(order[: layers // 2])
    assert max(b - a for a, b in pairwise(half)) <= 3


def test_unknown_policy_of_a_file_names_those_that_the_file_has(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from kv_cache import Policy\nPOLICIES = {'stay-here': Policy}\n")
    with pytest.raises(ValueError, match=f"policy = .*{file}") as refused:
        policy_of(f"{file}:other")
    assert "stay-here" in str(refused.value) and "flexgen" not in str(refused.value)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_layers_are_loaded_that_many_ahead(ahead: int) -> None:
    one = machine(64 * LAYER, 64 * LAYER, 0)
    policy, transfers = FlexGen(HOST, ahead), SimulatedTransfers(one, lambda call: LayerTime(1e6))
    run = IterationRunner(one, range(6), policy.layers, transfers, recorded=[])
    for new in (PROMPT, 1):
        run.run({"r": new}, {"r": ROW})
    assert run.recorded is not None
    loaded, acts = set[int](), run.recorded[-1].acts
    for act in acts:
        if act.kind == "copy" and act.tier == DEVICE and act.block:
            loaded.add(act.block.layer)
        if act.kind == "attend":
            assert loaded == set(range(min(act.layer + ahead + 1, 6)))
    assert sum(act.kind == "attend" for act in acts) == 6
