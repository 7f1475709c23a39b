"""The engine step by step, as a server drives it: decisions, placements, and requests that arrive and finish.

partner of: kv_cache/scheduler.py, kv_cache/request.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, DriveModel, ServingCost
from kv_cache.engine import Engine
from kv_cache.hardware import CSD, DEVICE, HOST
from kv_cache.planner.problem import Offload
from kv_cache.policies import POLICIES, policy_of
from kv_cache.policies.in_storage import InTwoPlaces
from kv_cache.policies.orbitflow import OrbitFlow, PlacementPolicy
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.request import SequenceState
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState
from kv_cache.trace import Request
from kv_cache.transfer.sequences import Levels, SequenceStore

COST = ServingCost(
    name="test",
    compute=CostModel.fitted(layers=4, step_s=0.01, token_s=1e-6, prefill_tokens_per_s=1e4),
    fetch_s=0.001,
    fetch_token_s=1e-5,
    room_blocks=10,
    drives=DriveModel(bytes_per_s=1e9, token_bytes=1024, call_s=1e-5),
)
LEVELS = Levels(
    token_bytes=1024,
    device_bytes=200 << 10,
    host_bytes=300 << 10,
    flash_bytes=1 << 30,
    host_bytes_per_s=1e8,
    flash_bytes_per_s=2e7,
    longest_tokens=181,
)
PATIENCE = 64


def engine(policy: Policy, longest_tokens: int = 0, cost: ServingCost = COST, **admission: int) -> Engine:
    if isinstance(policy, TimeSlices):
        policy.slice_tokens = 4
        return Engine(policy, COST, store=SequenceStore(LEVELS))
    limits = AdmissionConfig(max_paused_steps=PATIENCE, **admission)
    return Engine(policy, cost, 1.0, limits, longest_tokens=longest_tokens)


def request(number: int, given: int = 40, made: int = 20) -> Request:
    return Request(number=number, arrival=0.0, input_tokens=given, output_tokens=made)


def run(one: Engine, requests: list[Request], most: int = 10_000) -> dict[int, int]:
    """Serve all; checks that a request decodes after its prefill, and has a placement. Tokens of each."""
    for state in requests:
        one.check(state)
        one.add(state)
    tokens, stored = {state.number: 0 for state in requests}, dict[int, int]()
    lengths = {state.number: state.input_tokens for state in requests}
    for _ in range(most):
        output = one.schedule()
        if output is None:
            break
        for number in output.preempted:
            stored.pop(number, None)
        assert output.num_scheduled_tokens and set(output.num_scheduled_tokens) <= set(output.placement)
        for number, count in output.num_scheduled_tokens.items():
            stored[number] = stored.get(number, 0) + count
            assert stored[number] <= lengths[number] + tokens[number]
            tokens[number] += stored[number] == lengths[number] + tokens[number]
        one.complete(output, most=1)
    assert one.schedule() is None and not one.sequences
    return tokens


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunk", [0, 16])
def test_every_request_ends_under_every_policy(name: str, chunk: int) -> None:
    requests = [request(n, 20 + 9 * n, 5 + 3 * n) for n in range(12)]
    one = engine(policy_of(name), prefill_chunk_tokens=chunk)
    assert run(one, requests) == {asking.number: asking.output_tokens for asking in requests}


def test_layers_are_in_tiers_of_the_policy() -> None:
    class Two(PlacementPolicy):
        def place(self, s: SchedulerState) -> SchedulerOutput:
            return s.output(s.sequences[:2], [Offload(2), Offload(4, in_drives=True)][: len(s.sequences)])

    one = engine(Two())
    for number in range(3):
        one.add(request(number))
    for _ in range(3):
        output = one.schedule()
        assert output is not None and list(output.num_scheduled_tokens.values()) == [40]
        one.complete(output)
    output = one.schedule()
    assert output is not None and list(output.num_scheduled_tokens) == [0, 1]
    assert output.tiers(0, 4) == ((DEVICE,), (HOST,)) * 2
    assert output.tiers(1, 4) == ((CSD,),) * 4
    assert output.tiers(2, 4) == ((HOST,),) * 4


@pytest.mark.parametrize(
    ("longest", "rows", "expected"),
    [
        (14, 4, [7, 33, 1, 1]),  # half of the longest request
        (400, 8, [20, 20, 1, 1]),  # a share of the device: 10 blocks of 16 tokens, for 8 requests
        (400, 1000, [40, 1, 1, 1]),  # no room: as in-storage
        (400, 4, [40, 1, 1, 1]),  # the whole prompt
    ],
)
def test_first_tokens_of_each_request_stay_on_the_device(longest, rows, expected) -> None:  # type: ignore[no-untyped-def]
    one = engine(InTwoPlaces(), longest, max_batch_size=rows)
    one.add(request(0))
    counts, tiers = [], []
    for _ in expected:
        output = one.schedule()
        assert output is not None
        counts.append(output.num_scheduled_tokens[0])
        tiers.append(set(output.tiers(0, 4)))
        one.complete(output, most=1)
    assert counts == expected
    in_drives: set[tuple[str, ...]] = {(DEVICE, CSD)} if rows < 1000 else {(CSD,)}
    assert tiers == [{(DEVICE,)} if rows < 1000 else in_drives, *[in_drives] * 3]


def test_prompt_of_in_storage_is_stored_in_drives_at_once() -> None:
    for chunk in (0, 16):
        one = engine(policy_of("in-storage"), prefill_chunk_tokens=chunk)
        for number in range(3):
            one.add(request(number))
        for _ in range(10):
            output = one.schedule()
            assert output is not None
            assert {output.tiers(number, 4) for number in output.num_scheduled_tokens} == {((CSD,),) * 4}
            one.complete(output, most=1)


def test_patience_limits_pause_of_any_request() -> None:
    class First(PlacementPolicy):
        def place(self, s: SchedulerState) -> SchedulerOutput:
            return s.output(s.sequences[:1], [Offload(0)])

    one, longest, waits = engine(First(), cost=replace(COST, room_blocks=1000)), 0, dict.fromkeys(range(4), 0)
    for number in waits:
        one.add(request(number, 10, 400))
    for _ in range(600):
        output = one.schedule()
        assert output is not None
        one.complete(output, most=1)
        if len(one.sequences) == 4:
            waits = {n: 0 if n in output.num_scheduled_tokens else waited + 1 for n, waited in waits.items()}
            longest = max(longest, *waits.values())
    assert PATIENCE <= longest <= PATIENCE + 4


def test_finished_request_leaves_no_state() -> None:
    for name in POLICIES:
        policy = policy_of(name)
        one = engine(policy)
        for number in range(10):
            one.add(request(number, 60, 30))
        for turn in range(40):
            output = one.schedule()
            assert output is not None
            one.complete(output, most=1)
            if turn % 4 == 3:
                one.remove(turn // 4)  # in any state
        assert one.schedule() is None and not one.sequences and one.prompt is None and not one.queue
        if one.store is not None:
            assert one.store.free == LEVELS.capacities()


def test_uncomputed_iteration_yields_no_token() -> None:
    one = engine(OrbitFlow())
    for number in range(2):
        one.add(request(number))
        output = one.schedule()
        assert output is not None
        one.complete(output)
    output = one.schedule()
    assert output is not None and set(output.num_scheduled_tokens) == {0, 1}
    one.complete(output, ran={1}, most=1)
    assert [sequence.num_output_tokens for sequence in one.sequences] == [1, 2]


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"request 1: 2,039 tokens, test has room for 208"):
        engine(OrbitFlow()).check(request(1, 2000, 40))
    with pytest.raises(ValueError, match=r"request 1: 0\.23 MB of KV cache, and the tier device has 0\.20 MB"):
        engine(policy_of("lru")).check(request(1, 160, 60))


def test_replan_if_steps_slower_than_predicted() -> None:
    seen: list[tuple[bool, float]] = []

    class Seeing(PlacementPolicy):
        def place(self, s: SchedulerState) -> SchedulerOutput:
            seen.append((s.changed, s.cost.compute.linear_s()))
            return s.output(s.sequences, [Offload(0)] * len(s.sequences))

    one, step_s = engine(Seeing()), COST.compute.linear_s()
    one.add(request(0, 40, 100))
    for _ in range(30):
        output = one.schedule()
        assert output is not None
        one.complete(output, took_s=2 * COST.compute.decode_s(1, 60), most=1)
    again = [problem for changed, problem in seen[1:] if changed]
    assert again == sorted(again) and 1.25 * step_s < again[0] and 1.6 * step_s < again[-1] < 2.1 * step_s


def test_a_policy_is_an_object_or_its_class() -> None:
    one = OrbitFlow()
    assert Policy.of(one) is one
    assert isinstance(Policy.of(partial(OrbitFlow, late=0)), OrbitFlow)
    assert run(engine(Policy.of(Policy)), [request(0)]) == {0: 20}
    for other in (3, lambda it: None, int):
        with pytest.raises(ValueError, match="is not a policy"):
            Policy.of(other)
    with pytest.raises(ValueError, match="policy = 'best': must be one of reactive"):
        policy_of("best")


@pytest.mark.parametrize(("missing", "outputs", "prefills"), [(1, 0, True), (1, 1, False), (2, 1, True), (3, 4, True)])
def test_a_sequence_prefills_until_only_its_next_token_is_missing(missing, outputs, prefills) -> None:
    request = Request(number=1, arrival=0.0, input_tokens=8, output_tokens=9)
    sequence = SequenceState(request, 0.0, num_output_tokens=outputs, num_computed_tokens=8 + outputs - missing)
    assert (sequence.num_missing_tokens, sequence.prefills) == (missing, prefills)
