"""partner of: residency/real/conductor.py"""

from __future__ import annotations

import pytest

from residency.real.conductor import Abandoned, Conductor
from residency.table import Refused
from residency.turn import Attention


def attention(layer: int) -> Attention:
    return Attention(layer, ("r",), "device", "dense", (), ())


def turn(conductor: Conductor, layers: list[int], said: list[str]):  # type: ignore[no-untyped-def]
    def run() -> None:
        for layer in layers:
            said.append(f"before {layer}")
            conductor.attends(attention(layer))
            said.append(f"after {layer}")

    return run


def test_policy_and_model_take_turns() -> None:
    conductor, said = Conductor(), list[str]()
    for _ in range(2):
        conductor.start(turn(conductor, [0, 1], said))
        assert conductor.reach(0).layer == 0
        assert said == ["before 0"]
        conductor.reach(1)
        assert said == ["before 0", "after 0", "before 1"]
        conductor.finish()
        assert said[-1] == "after 1"
        said.clear()


def test_what_a_policy_raises_is_the_models_to_raise() -> None:
    conductor = Conductor()

    def breaks() -> None:
        conductor.attends(attention(0))
        raise KeyError("mine")

    conductor.start(breaks)
    conductor.reach(0)
    with pytest.raises(KeyError, match="mine"):
        conductor.reach(1)
    conductor.start(turn(conductor, [0], []))
    conductor.reach(0)
    conductor.finish()


@pytest.mark.parametrize(
    ("layers", "reached", "reason"),
    [
        ([1], [0], "the policy attends to layer 1, the model is at layer 0"),
        ([0], [0, 1], "the policy ended its turn, the model is at layer 1"),
    ],
)
def test_a_policy_that_does_something_else(layers: list[int], reached: list[int], reason: str) -> None:
    conductor = Conductor()
    conductor.start(turn(conductor, layers, []))
    with pytest.raises(Refused, match=reason):
        for layer in reached:
            conductor.reach(layer)
    conductor.abandon()


def test_a_policy_that_goes_on_after_the_model() -> None:
    conductor = Conductor()
    conductor.start(turn(conductor, [0, 1], []))
    conductor.reach(0)
    with pytest.raises(Refused, match="the policy attends to layer 1, the model has no more"):
        conductor.finish()


@pytest.mark.parametrize("reached", [0, 1])
def test_a_forward_that_fails_takes_the_policy_with_it(reached: int) -> None:
    conductor, seen = Conductor(), list[str]()

    def run() -> None:
        try:
            turn(conductor, [0, 1, 2], [])()
        except Abandoned:
            seen.append("abandoned")
            raise

    conductor.start(run)
    for layer in range(reached):
        conductor.reach(layer)
    conductor.abandon()
    assert seen == ["abandoned"]
    conductor.abandon()  # nothing is under way
