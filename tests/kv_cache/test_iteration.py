"""partner of: kv_cache/iteration.py, kv_cache/transfer/engine.py, kv_cache/hardware.py"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kv_cache import DEVICE, HOST, Iteration, IterationRunner, Machine, PolicyError, Route, SharedLink, Tier
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

MACHINE = Machine.of(
    [Tier(DEVICE, attends=True), Tier(HOST)],
    [SharedLink("bus", 1e9)],
    {(DEVICE, HOST): Route("out", ("bus",), block_bytes=4096), (HOST, DEVICE): Route("in", ("bus",))},
)


def runner(policy, layers: int = 2) -> IterationRunner:  # type: ignore[no-untyped-def]  # any function
    return IterationRunner(MACHINE, range(layers), policy, SimulatedTransfers(MACHINE, lambda attention: LayerTime(10)))


def test_every_layer_is_attended_once_and_in_order() -> None:
    def backwards(t: Iteration) -> None:
        t.attend(1)

    with pytest.raises(PolicyError, match=r"attend\(layer 1\) of request r: layer 0 is due"):
        runner(backwards).run({"r": 3}, {"r": 8})
    with pytest.raises(PolicyError, match="ended its iteration before layer 1 of request r was attended"):
        runner(lambda t: t.attend(0)).run({"r": 3}, {"r": 8})
    with pytest.raises(PolicyError, match="request s: it is not in this iteration"):
        runner(lambda t: t.attend(0, ["s"])).run({"r": 3}, {"r": 8})


def test_whole_blocks_are_counted() -> None:
    def policy(t: Iteration) -> None:
        for layer in t.layers:
            t.attend(layer)
            for block in t.blocks(layer):
                assert t.copy(block, HOST) is not None
                assert t.copy(block, HOST) is None

    run = runner(policy, layers=1)
    run.run({"r": 3}, {"r": 1000})
    assert (run.traffic["out"].copies, run.traffic["out"].bytes) == (2, 2 * 4096)
    run.run({"r": 1}, {"r": 1000})
    assert run.traffic["out"].bytes == 4 * 4096  # the block that the new token begins in is written again


def test_policy_can_query_sizes_and_tiers() -> None:
    seen = {}

    def policy(t: Iteration) -> None:
        seen["bytes"] = t.layer_bytes(), t.layer_bytes(10)
        for layer in t.layers:
            t.attend(layer)
        x = t.blocks(1)[0]
        seen["where"], seen["tokens"], seen["nbytes"] = t.tiers_of(x), t.tokens(x), t.nbytes(x)
        seen["next"] = t.next_use(x)

    run = runner(policy)
    run.run({"r": 3, "s": 5}, {"r": 8, "s": 8})
    assert seen == {"bytes": (2 * 8 * 8, 2 * 2 * 80), "where": (DEVICE,), "tokens": 3, "nbytes": 24, "next": 0}
    run.run({"r": 1, "s": 1}, {"r": 8, "s": 8})
    assert seen["bytes"][0] == 2 * 10 * 8


def test_machine_with_inconsistent_names_is_refused() -> None:
    with pytest.raises(ValueError, match="route x: unknown link 'bus'"):
        Machine.of([Tier(DEVICE), Tier(HOST)], [], {(DEVICE, HOST): Route("x", ("bus",))})
    with pytest.raises(ValueError, match="link bus: contention by unknown link 'dma'"):
        Machine.of([], [SharedLink("bus", 1, contention={"dma": 0.5})], {})
    with pytest.raises(ValueError, match="contention by dma: a share"):
        SharedLink("bus", 1, contention={"dma": 0})


def test_copy_without_route_is_refused() -> None:
    def policy(t: Iteration) -> None:
        t.attend(0)
        t.copy(t.blocks(0)[0], "disk")

    with pytest.raises(PolicyError, match="there is no route from device to disk"):
        runner(policy, layers=1).run({"r": 1}, {"r": 8})


@pytest.mark.parametrize(("new", "is_prefill"), [({"a": 1, "b": 1}, False), ({"a": 1, "b": 2}, True)])
def test_iteration_with_several_tokens_is_prefill(new, is_prefill):  # type: ignore[no-untyped-def]
    assert Iteration.prefill.fget(SimpleNamespace(new=new)) == is_prefill  # type: ignore[attr-defined]  # a property's
