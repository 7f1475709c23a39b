"""partner of: kv_cache/transfer/simulated.py, kv_cache/page_cache.py"""

from __future__ import annotations

import pytest

from kv_cache import (
    CSD,
    DEVICE,
    DIRECT,
    HOST,
    PAGE_CACHE,
    Iteration,
    IterationRunner,
    Machine,
    Policy,
    PolicyError,
    Route,
    SharedLink,
    Tier,
)
from kv_cache.policies.dual_blade import DualBlade
from kv_cache.policies.flexgen import FlexGen
from kv_cache.policies.split import Split
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

GB = 10**9
ROW = 1000
LAYERS = 8
PROMPT = 100
LAYER = 2 * ROW * PROMPT  # bytes of a layer's KV data after the prompt


def machine(device: int | None = None, cache: int = 0, fifo: bool = False) -> Machine:
    """A device, a page cache at 10 GB/s over an SSD at 1, and the same SSD directly."""
    links = [
        SharedLink("ssd", 1 * GB),
        SharedLink("copy", 10 * GB),
        SharedLink("dma", 20 * GB),
        SharedLink("back", 1 * GB),
    ]
    tiers = [Tier(DEVICE, device, attends=True), Tier(HOST), Tier(PAGE_CACHE, cache_bytes=cache), Tier(DIRECT)]
    routes = {
        (PAGE_CACHE, DEVICE): Route("file", ("copy", "dma"), miss_links=("ssd", "copy", "dma")),
        (DEVICE, PAGE_CACHE): Route("file-out", ("copy",), background=("back",)),
        (DIRECT, DEVICE): Route("direct", ("ssd", "dma")),
        (DEVICE, DIRECT): Route("direct-out", ("back",)),
    }
    return Machine.of(tiers, links, routes)


def run(
    policy: Policy, machine: Machine, steps: int = 4, layer_ns: int = 0
) -> tuple[IterationRunner, SimulatedTransfers]:
    transfers = SimulatedTransfers(machine, lambda attention: LayerTime(layer_ns))
    runner = IterationRunner(machine, range(LAYERS), policy, transfers, final_tokens=PROMPT + steps)
    runner.run({"r": PROMPT}, {"r": ROW})
    transfers.settle()
    for _ in range(steps):
        runner.run({"r": 1}, {"r": ROW})
    runner.table.check()
    return runner, transfers


@pytest.mark.parametrize("cached_layers", [0, 3, 6, 7])
def test_cyclic_reads_of_too_small_cache_never_hit(cached_layers: int) -> None:
    _, transfers = run(FlexGen().layers, machine(cache=cached_layers * (LAYER + 4 * 2 * ROW)))
    assert transfers.caches[PAGE_CACHE].hit_share == 0


def test_reads_of_fitting_cache_always_hit() -> None:
    _, transfers = run(FlexGen().layers, machine(cache=LAYERS * (LAYER + 8 * ROW)))
    assert transfers.caches[PAGE_CACHE].hit_share == 1


@pytest.mark.parametrize("cached_layers", [1, 3, 7])
def test_dual_blade_caches_fitting_layers_and_always_hits(cached_layers: int) -> None:
    _, transfers = run(DualBlade().layers, machine(cache=cached_layers * (LAYER + 8 * ROW)))
    assert transfers.caches[PAGE_CACHE].hit_share == 1
    assert transfers.moved["file"] * (LAYERS - cached_layers) == transfers.moved["direct"] * cached_layers


def test_intra_and_cross_pipelining_take_known_times() -> None:
    """Intra: both reads share the SSD, then both copies the bus. Cross: K's copy goes under V's read."""
    _, transfers = run(DualBlade(ahead=0, share=0.0).layers, machine(), steps=5)
    together, behind = transfers.iterations_ns[2] / LAYERS, transfers.iterations_ns[3] / LAYERS
    part_read, part_dma = ROW * (PROMPT + 1.0), ROW * (PROMPT + 1.0) / 20
    assert together == pytest.approx(2 * part_read + 2 * part_dma, rel=1e-2)
    assert behind == pytest.approx(2 * part_read + part_dma, rel=2e-2)
    assert transfers.iterations_ns[4] == pytest.approx(transfers.iterations_ns[3], rel=2e-2)


def test_prefetched_layers_cause_no_wait() -> None:
    far = run(FlexGen(home=DIRECT, ahead=0).layers, machine(), layer_ns=LAYER * 2)[1]
    near = run(FlexGen(home=DIRECT).layers, machine(), layer_ns=LAYER * 2)[1]
    assert sum(near.stalls_ns.values()) < sum(far.stalls_ns.values()) / 7


@pytest.mark.parametrize("policy", [FlexGen, DualBlade, Split])
@pytest.mark.parametrize("layers_that_fit", [1, 2, 3])
def test_small_device_keeps_its_limit(policy: type[Policy], layers_that_fit: int) -> None:
    limit = layers_that_fit * (LAYER + 8 * ROW)
    runner, _ = run(policy().layers, machine(device=limit, cache=3 * LAYER))
    assert runner.table.peak[DEVICE] <= limit


def test_a_device_too_small_for_a_layer_is_refused() -> None:
    with pytest.raises(PolicyError, match="device is full: 100,000 bytes are wanted, 50,000 of 150,000 are free"):
        run(FlexGen().layers, machine(device=150_000))


def test_frame_is_reused_after_its_last_reader() -> None:
    """The device has room for one layer: an incoming copy waits until the outgoing block has left."""
    order = Machine.of(
        [Tier(DEVICE, LAYER, attends=True), Tier(HOST)],
        [SharedLink("down", 1 * GB), SharedLink("up", 1 * GB)],
        {(DEVICE, HOST): Route("out", ("down",)), (HOST, DEVICE): Route("in", ("up",))},
    )
    transfers = SimulatedTransfers(order, lambda attention: LayerTime(0))

    def policy(t: Iteration) -> None:
        for layer in t.layers:
            t.attend(layer)
            for block in t.blocks(layer):
                t.move(block, HOST)
        assert t.free_bytes(DEVICE) == LAYER
        k, v = t.blocks(0)
        began = [t.move(block, DEVICE) for block in (k, v)]
        t.wait(*began)
        assert transfers.now_ns == 2 * LAYER + LAYER  # two layers down, the first one up again
        for block in (k, v):
            t.move(block, HOST)

    runner = IterationRunner(order, range(2), policy, transfers)
    runner.run({"r": PROMPT}, {"r": ROW})
    runner.table.check()


def test_half_batches_overlap_drives_and_device() -> None:
    one = Machine.of([Tier(CSD, attends=True)], [], {})
    transfers = SimulatedTransfers(one, lambda attention: LayerTime(100, 100))

    def halves(t: Iteration) -> None:
        for layer in t.layers:
            for request in t.batch:
                t.attend(layer, [request], at=CSD)

    IterationRunner(one, range(10), halves, transfers).run({"a": 1, "b": 1}, {"a": ROW, "b": ROW})
    assert transfers.iterations_ns == [2 * 10 * 100 + 100]  # the last half's drives are waited for


def test_write_back_throttles_above_dirty_limit() -> None:
    tiers = [Tier(DEVICE, attends=True), Tier(PAGE_CACHE, cache_bytes=10 * LAYER, dirty_bytes=LAYER)]
    links = [SharedLink("copy", 10 * GB), SharedLink("ssd", 1 * GB, fifo=True), SharedLink("dma", 20 * GB)]
    routes = {
        (DEVICE, PAGE_CACHE): Route("file-out", ("copy",), background=("ssd",)),
        (PAGE_CACHE, DEVICE): Route("file", ("copy", "dma")),
    }
    one = Machine.of(tiers, links, routes)
    transfers = SimulatedTransfers(one, lambda attention: LayerTime(0))
    waited: list[int] = []

    def policy(t: Iteration) -> None:
        begun = []
        for layer in t.layers:
            t.attend(layer)
            begun += [t.move(block, PAGE_CACHE) for block in t.blocks(layer)]
        t.wait(*begun)
        waited.append(transfers.now_ns)

    IterationRunner(one, range(LAYERS), policy, transfers).run({"r": PROMPT}, {"r": ROW})
    copied_ns, written_ns = LAYERS * LAYER / 10, (LAYERS - 1) * LAYER  # a layer may stay dirty
    assert waited[0] == copied_ns + written_ns


@pytest.mark.parametrize("piece_bytes", [0, 10**6, 7 * 10**6])
def test_single_copy_takes_predicted_time(piece_bytes: int) -> None:
    """In pieces the slowest link is busy throughout, and the first piece crosses the others alone."""
    links = [SharedLink("ssd", 1 * GB), SharedLink("dma", 4 * GB), SharedLink("back", 1 * GB)]
    route = Route("direct", ("ssd", "dma"), piece_bytes)
    tiers = [Tier(DEVICE, attends=True), Tier(DIRECT)]
    given = Machine.of(tiers, links, {(DIRECT, DEVICE): route, (DEVICE, DIRECT): Route("out", ("back",))})
    transfers, took = SimulatedTransfers(given, lambda attention: LayerTime(0)), list[float]()

    def policy(t: Iteration) -> None:
        for layer in t.layers:
            if not t.prefill:
                key, value = t.blocks(layer)
                began = transfers.now_ns
                t.wait(t.copy(key, DEVICE))
                took.append((transfers.now_ns - began) / 1e9)
                took.append(t.transfer_s(DIRECT, DEVICE, t.nbytes(key)))
                t.wait(t.copy(value, DEVICE))
            t.attend(layer)
            for block in t.blocks(layer):
                t.move(block, DIRECT)

    runner = IterationRunner(given, range(1), policy, transfers)
    for new in (7000, 1, 1):  # the last one finds nothing on its way home
        runner.run({"r": new}, {"r": ROW})
    real, told = took[-2:]
    assert told == pytest.approx(real, rel=1e-3)
