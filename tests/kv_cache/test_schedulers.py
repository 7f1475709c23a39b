"""partner of: kv_cache/schedulers.py"""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace

import pytest

from kv_cache.cost import CostModel, DriveModel, ServingCost
from kv_cache.engine import SchedulerOutput
from kv_cache.hardware import CSD, DEVICE, HOST
from kv_cache.planner.problem import Offload
from kv_cache.policies.orbitflow import POLICIES, Planner
from kv_cache.schedulers import PATIENCE, Scheduler, Slices, Slots
from kv_cache.tiered.machine import Machine
from kv_cache.tiered.policies import POLICIES as TIERED
from kv_cache.trace import Request

COST = ServingCost(
    name="test",
    compute=CostModel.fitted(layers=4, step_s=0.01, token_s=1e-6, prefill_tokens_per_s=1e4),
    fetch_s=0.001,
    fetch_token_s=1e-5,
    room_blocks=10,
    drives=DriveModel(bytes_per_s=1e9, token_bytes=1024, call_s=1e-5),
)
MACHINE = Machine(
    token_bytes=1024,
    device_bytes=200 << 10,
    host_bytes=300 << 10,
    flash_bytes=1 << 30,
    host_bytes_per_s=1e8,
    flash_bytes_per_s=2e7,
    cost=CostModel.fitted(layers=4, step_s=0.01, token_s=1024 / 1e10, prefill_tokens_per_s=1e4),
)


def request(number: int, given: int = 40, made: int = 20) -> Request:
    return Request(number=number, arrival=0.0, input_tokens=given, output_tokens=made)


def run(scheduler: Scheduler, requests: list[Request], most: int = 10_000) -> dict[int, int]:
    """Serve all; checks that who decodes has been prefilled, and that nobody is left. Tokens of each."""
    for each in requests:
        scheduler.check(each)
        scheduler.add(each)
    wanted = {each.number: each.output_tokens for each in requests}
    tokens, stored = dict.fromkeys(wanted, 0), set[int]()
    for _ in range(most):
        choice = scheduler.next()
        if choice is None:
            break
        stored &= set(choice.homes)  # what has no home is given up
        stored |= set(choice.entering)
        made = set(choice.running) | set(choice.entering)
        assert made and made <= stored <= set(choice.homes)
        for number in made:
            tokens[number] += 1
        scheduler.made(made)
        for number in [number for number in made if tokens[number] == wanted[number]]:
            scheduler.remove(number)
            stored.discard(number)
    assert scheduler.next() is None
    return tokens


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_under_every_policy_that_places(name: str) -> None:
    requests = [request(n, 20 + 9 * n, 5 + n) for n in range(12)]
    tokens = run(Slots(POLICIES[name], COST, COST.slo_s(1.5)), requests)
    assert tokens == {each.number: each.output_tokens for each in requests}


@pytest.mark.parametrize("name", TIERED)
def test_every_request_ends_under_every_policy_that_takes_turns(name: str) -> None:
    requests = [request(n, 20 + 9 * n, 5 + 3 * n) for n in range(12)]
    tokens = run(Slices(TIERED[name], MACHINE, 4, 4, 180), requests)
    assert tokens == {each.number: each.output_tokens for each in requests}


def test_layers_lie_where_the_policy_has_them() -> None:
    def policy(now) -> SchedulerOutput:  # type: ignore[no-untyped-def]
        return SchedulerOutput(now.live[:2], [Offload(2), Offload(4, in_drives=True)][: len(now.live)])

    slots = Slots(policy, COST, 1.0)
    for number in range(3):
        slots.add(request(number))
    for _ in range(2):
        slots.made((slots.next() or pytest.fail("nobody is there")).entering)
    choice = slots.next()
    assert choice is not None and choice.running == (0, 1) and choice.entering == (2,)
    assert choice.homes == {0: [(DEVICE,), (HOST,)] * 2, 1: [(CSD,)] * 4, 2: [(HOST,)] * 4}
    two = Slots(policy, COST, 1.0, head=7)
    for number in range(2):
        two.add(request(number))
        choice = two.next()
        assert choice is not None
        two.made(choice.entering)
    choice = two.next()
    assert choice is not None and choice.homes[1] == [(DEVICE, CSD)] * 4 and choice.head == 7


def test_nobody_is_passed_over_for_long() -> None:
    def first_alone(now) -> SchedulerOutput:  # type: ignore[no-untyped-def]
        return SchedulerOutput(now.live[:1], [Offload(0)])

    slots, longest, waits = Slots(first_alone, COST, 1.0), 0, dict.fromkeys(range(4), 0)
    for number in waits:
        slots.add(request(number, 10, 400))
    for _ in range(600):
        choice = slots.next()
        assert choice is not None
        ran = {*choice.running, *choice.entering}
        slots.made(ran)
        waits = {n: 0 if n in ran else waited + 1 for n, waited in waits.items()}
        longest = max(longest, *waits.values())
    assert PATIENCE <= longest <= PATIENCE + 4


def test_a_request_that_goes_leaves_nothing() -> None:
    for policy in TIERED.values():
        slices = Slices(policy, MACHINE, 4, 4, 180)
        for number in range(10):
            slices.add(request(number, 60, 30))
        for turn in range(40):
            choice = slices.next()
            assert choice is not None
            slices.made({*choice.running})
            if turn % 4 == 3:
                slices.remove(turn // 4)  # wherever it is
        assert slices.next() is None
        assert slices._server.store.free == slices._server.machine.rooms()
    slots = Slots(Planner(), COST, 1.0)
    slots.add(request(1))
    slots.remove(1)
    assert slots.next() is None


def test_what_there_never_is_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"request 1: 2,039 tokens, test has room for 208"):
        Slots(Planner(), COST, 1.0).check(request(1, 2000, 40))
    with pytest.raises(ValueError, match=r"request 1: 0\.23 MB of K and V, and the tier device has 0\.20 MB"):
        Slices(TIERED["lru"], MACHINE, 4, 4, 180).check(request(1, 160, 60))


def test_plans_are_made_again_where_steps_take_longer_than_predicted() -> None:
    seen: list[tuple[bool, float]] = []

    def policy(now) -> SchedulerOutput:  # type: ignore[no-untyped-def]
        seen.append((now.changed, now.cost.compute.linear_s()))
        return SchedulerOutput(now.live, [Offload(0)] * len(now.live))

    slots = Slots(policy, COST, 1.0)
    slots.add(request(0, 40, 100))
    for _ in range(30):
        choice = slots.next()
        assert choice is not None
        slots.made(choice.running, 2 * COST.compute.decode_s(1, 60))
    again = [step_s for changed, step_s in seen[1:] if changed]
    assert (
        again == sorted(again)
        and 1.25 * COST.compute.linear_s() < again[0]
        and 1.6 * COST.compute.linear_s() < again[-1] < 2.1 * COST.compute.linear_s()
    )


def test_of_a_request_that_is_removed_nothing_stays() -> None:
    slots = SimpleNamespace(live=[], _queue=deque(), _passed_over=Counter({3: 5, 4: 1}))
    Slots.remove(slots, 3)  # type: ignore[arg-type]  # all that it asks for
    assert slots._passed_over == {4: 1}
