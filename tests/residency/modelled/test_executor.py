"""partner of: residency/modelled/executor.py, residency/modelled/cache.py"""

from __future__ import annotations

from functools import partial

import pytest

from residency import (
    CSD,
    DEVICE,
    DIRECT,
    HOST,
    PAGE_CACHE,
    Link,
    Machine,
    Path,
    Place,
    Policy,
    Refused,
    Residency,
    Turn,
)
from residency.modelled.executor import Modelled, Work
from residency.policies.dual_blade import dual_blade
from residency.policies.flexgen import flexgen
from residency.policies.split import split

GB = 10**9
ROW = 1000
LAYERS = 8
PROMPT = 100
LAYER = 2 * ROW * PROMPT  # bytes of K and V of a layer after the prompt


def machine(device: int | None = None, cache: int = 0, in_turn: bool = False) -> Machine:
    """A device, a page cache at 10 GB/s over an SSD at 1, and the same SSD directly."""
    links = [Link("ssd", 1 * GB), Link("copy", 10 * GB), Link("dma", 20 * GB), Link("back", 1 * GB)]
    places = [Place(DEVICE, device, attends=True), Place(HOST), Place(PAGE_CACHE, cache_bytes=cache), Place(DIRECT)]
    paths = {
        (PAGE_CACHE, DEVICE): Path("file", ("copy", "dma"), missed=("ssd", "copy", "dma")),
        (DEVICE, PAGE_CACHE): Path("file-out", ("copy",), background=("back",)),
        (DIRECT, DEVICE): Path("direct", ("ssd", "dma")),
        (DEVICE, DIRECT): Path("direct-out", ("back",)),
    }
    return Machine.of(places, links, paths)


def run(policy: Policy, machine: Machine, steps: int = 4, layer_ns: int = 0) -> tuple[Residency, Modelled]:
    executor = Modelled(machine, lambda attention: Work(layer_ns))
    residency = Residency(machine, range(LAYERS), policy, executor, final_tokens=PROMPT + steps)
    residency.turn({"r": PROMPT}, {"r": ROW})
    executor.settle()
    for _ in range(steps):
        residency.turn({"r": 1}, {"r": ROW})
    residency.table.check()
    return residency, executor


@pytest.mark.parametrize("cached_layers", [0, 3, 6, 7])
def test_what_goes_round_and_does_not_fit_finds_nothing(cached_layers: int) -> None:
    _, executor = run(flexgen, machine(cache=cached_layers * (LAYER + 4 * 2 * ROW)))
    assert executor.caches[PAGE_CACHE].hit_share == 0


def test_what_fits_is_found() -> None:
    _, executor = run(flexgen, machine(cache=LAYERS * (LAYER + 8 * ROW)))
    assert executor.caches[PAGE_CACHE].hit_share == 1


@pytest.mark.parametrize("cached_layers", [1, 3, 7])
def test_dual_blade_keeps_what_fits_and_hits_every_time(cached_layers: int) -> None:
    residency, executor = run(dual_blade, machine(cache=cached_layers * (LAYER + 8 * ROW)))
    assert residency.memory["n1"] == cached_layers
    assert executor.caches[PAGE_CACHE].hit_share == 1
    assert executor.moved["file"] * (LAYERS - cached_layers) == executor.moved["direct"] * cached_layers


def test_together_and_one_behind_the_other() -> None:
    """Intra: both reads share the SSD, then both copies the bus. Cross: K's copy goes under V's read."""
    residency, executor = run(partial(dual_blade, ahead=0, share=0.0), machine(), steps=5)
    assert residency.memory["faster"] == {2: True}
    together, behind = executor.turns_ns[2] / LAYERS, executor.turns_ns[3] / LAYERS
    part_read, part_dma = ROW * (PROMPT + 1.0), ROW * (PROMPT + 1.0) / 20
    assert together == pytest.approx(2 * part_read + 2 * part_dma, rel=1e-2)
    assert behind == pytest.approx(2 * part_read + part_dma, rel=2e-2)
    assert executor.turns_ns[4] == pytest.approx(executor.turns_ns[3], rel=2e-2)


def test_what_comes_ahead_is_not_waited_for() -> None:
    far = run(partial(flexgen, home=DIRECT, ahead=0), machine(), layer_ns=LAYER * 2)[1]
    near = run(partial(flexgen, home=DIRECT, ahead=1), machine(), layer_ns=LAYER * 2)[1]
    assert sum(near.stalls_ns.values()) < sum(far.stalls_ns.values()) / 7


@pytest.mark.parametrize("policy", [flexgen, dual_blade, split])
@pytest.mark.parametrize("layers_that_fit", [1, 2, 3])
def test_a_small_device_holds_what_is_due(policy: Policy, layers_that_fit: int) -> None:
    limit = layers_that_fit * (LAYER + 8 * ROW)
    residency, _ = run(policy, machine(device=limit, cache=3 * LAYER))
    assert residency.table.peak[DEVICE] <= limit


def test_a_device_too_small_for_a_layer_is_refused() -> None:
    with pytest.raises(Refused, match="device is full: 100,000 bytes are wanted, 50,000 of 150,000 are free"):
        run(flexgen, machine(device=150_000))


def test_a_frame_is_handed_on_when_its_last_reader_has_ended() -> None:
    """The device has room for one layer: what comes waits until what goes has left."""
    order = Machine.of(
        [Place(DEVICE, LAYER, attends=True), Place(HOST)],
        [Link("down", 1 * GB), Link("up", 1 * GB)],
        {(DEVICE, HOST): Path("out", ("down",)), (HOST, DEVICE): Path("in", ("up",))},
    )
    executor = Modelled(order, lambda attention: Work(0))

    def policy(t: Turn) -> None:
        for layer in t.layers:
            t.attend(layer)
            for extent in t.extents(layer):
                t.move(extent, HOST)
        assert t.room(DEVICE) == LAYER
        k, v = t.extents(0)
        began = [t.move(extent, DEVICE) for extent in (k, v)]
        t.wait(*began)
        assert executor.now_ns == 2 * LAYER + LAYER  # two layers down, the first one up again
        for extent in (k, v):
            t.move(extent, HOST)

    residency = Residency(order, range(2), policy, executor)
    residency.turn({"r": PROMPT}, {"r": ROW})
    residency.table.check()


def test_drives_attend_for_one_half_while_the_device_computes_for_the_other() -> None:
    one = Machine.of([Place(CSD, attends=True)], [], {})
    executor = Modelled(one, lambda attention: Work(100, 100))

    def halves(t: Turn) -> None:
        for layer in t.layers:
            for request in t.batch:
                t.attend(layer, [request], at=CSD)

    Residency(one, range(10), halves, executor).turn({"a": 1, "b": 1}, {"a": ROW, "b": ROW})
    assert executor.turns_ns == [2 * 10 * 100 + 100]  # the last half's drives are waited for


def test_writing_back_holds_up_who_dirties_more_than_may_wait() -> None:
    places = [Place(DEVICE, attends=True), Place(PAGE_CACHE, cache_bytes=10 * LAYER, dirty_bytes=LAYER)]
    links = [Link("copy", 10 * GB), Link("ssd", 1 * GB, in_turn=True), Link("dma", 20 * GB)]
    paths = {
        (DEVICE, PAGE_CACHE): Path("file-out", ("copy",), background=("ssd",)),
        (PAGE_CACHE, DEVICE): Path("file", ("copy", "dma")),
    }
    one = Machine.of(places, links, paths)
    executor = Modelled(one, lambda attention: Work(0))
    waited: list[int] = []

    def policy(t: Turn) -> None:
        tickets = []
        for layer in t.layers:
            t.attend(layer)
            tickets += [t.move(extent, PAGE_CACHE) for extent in t.extents(layer)]
        t.wait(*tickets)
        waited.append(executor.now_ns)

    Residency(one, range(LAYERS), policy, executor).turn({"r": PROMPT}, {"r": ROW})
    copied_ns, written_ns = LAYERS * LAYER / 10, (LAYERS - 1) * LAYER  # a layer may stay dirty
    assert waited[0] == copied_ns + written_ns
