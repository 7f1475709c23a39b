"""partner of: residency/turn.py, residency/executor.py, residency/machine.py"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from residency import DEVICE, HOST, Link, Machine, Path, Place, Refused, Residency, Turn
from residency.modelled.executor import Modelled, Work

MACHINE = Machine.of(
    [Place(DEVICE, attends=True), Place(HOST)],
    [Link("bus", 1e9)],
    {(DEVICE, HOST): Path("out", ("bus",), block_bytes=4096), (HOST, DEVICE): Path("in", ("bus",))},
)


def residency(policy, layers: int = 2) -> Residency:  # type: ignore[no-untyped-def]  # any function
    return Residency(MACHINE, range(layers), policy, Modelled(MACHINE, lambda attention: Work(10)))


def test_every_layer_is_attended_once_and_in_order() -> None:
    def backwards(t: Turn) -> None:
        t.attend(1)

    with pytest.raises(Refused, match=r"attend\(layer 1\) of request r: layer 0 is due"):
        residency(backwards).turn({"r": 3}, {"r": 8})
    with pytest.raises(Refused, match="ended its turn before layer 1 of request r was attended"):
        residency(lambda t: t.attend(0)).turn({"r": 3}, {"r": 8})
    with pytest.raises(Refused, match="request s: it is not in this turn"):
        residency(lambda t: t.attend(0, ["s"])).turn({"r": 3}, {"r": 8})


def test_whole_blocks_are_counted() -> None:
    def policy(t: Turn) -> None:
        for layer in t.layers:
            t.attend(layer)
            for extent in t.extents(layer):
                assert t.copy(extent, HOST) is not None
                assert t.copy(extent, HOST) is None

    run = residency(policy, layers=1)
    run.turn({"r": 3}, {"r": 1000})
    assert (run.traffic["out"].copies, run.traffic["out"].bytes) == (2, 2 * 4096)
    run.turn({"r": 1}, {"r": 1000})
    assert run.traffic["out"].bytes == 4 * 4096  # the block that the new token begins in is written again


def test_what_a_policy_may_ask() -> None:
    seen = {}

    def policy(t: Turn) -> None:
        seen["bytes"] = t.layer_bytes(), t.layer_bytes(10)
        for layer in t.layers:
            t.attend(layer)
        x = t.extents(1)[0]
        seen["where"], seen["tokens"], seen["nbytes"] = t.where(x), t.tokens(x), t.nbytes(x)
        seen["next"] = t.next_use(x)

    run = residency(policy)
    run.turn({"r": 3, "s": 5}, {"r": 8, "s": 8})
    assert seen == {"bytes": (2 * 8 * 8, 2 * 2 * 80), "where": (DEVICE,), "tokens": 3, "nbytes": 24, "next": 0}
    run.turn({"r": 1, "s": 1}, {"r": 8, "s": 8})
    assert seen["bytes"][0] == 2 * 10 * 8


def test_a_machine_whose_names_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="path x: there is no link 'bus'"):
        Machine.of([Place(DEVICE), Place(HOST)], [], {(DEVICE, HOST): Path("x", ("bus",))})
    with pytest.raises(ValueError, match="link bus: there is no link 'dma'"):
        Machine.of([], [Link("bus", 1, hindered={"dma": 0.5})], {})
    with pytest.raises(ValueError, match="hindered by dma: a share"):
        Link("bus", 1, hindered={"dma": 0})


def test_no_path_no_copy() -> None:
    def policy(t: Turn) -> None:
        t.attend(0)
        t.copy(t.extents(0)[0], "disk")

    with pytest.raises(Refused, match="there is no path from device to disk"):
        residency(policy, layers=1).turn({"r": 1}, {"r": 8})


@pytest.mark.parametrize(("new", "is_prefill"), [({"a": 1, "b": 1}, False), ({"a": 1, "b": 2}, True)])
def test_a_turn_in_which_a_request_gets_several_tokens_is_prefill(new, is_prefill):  # type: ignore[no-untyped-def]
    assert Turn.prefill.fget(SimpleNamespace(new=new)) == is_prefill  # type: ignore[attr-defined]  # a property's
