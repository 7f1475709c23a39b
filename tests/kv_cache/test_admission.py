"""Admission: orders without starvation, a bounded queue, and chunked prefill.

partner of: kv_cache/admission.py, kv_cache/engine.py, kv_cache/metrics.py
"""

from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from kv_cache.admission import FULL, TOO_LONG, AdmissionConfig
from kv_cache.metrics import summary
from kv_cache.policies.orbitflow import FlexGenHalf, Heuristic, OrbitFlow
from kv_cache.simulation import simulate
from kv_cache.trace import Request, Trace
from tests.kv_cache.test_engine import COST

ROOMY = replace(COST, room_blocks=4000)


def trace(count=60, gap_s=0.2, longest=3000, seed=0):
    """Requests of very different lengths."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(gap_s, count))
    inputs, outputs = (np.exp(generator.uniform(np.log(8), np.log(top), count)).astype(int) for top in (longest, 60))
    numbered = enumerate(zip(arrivals.tolist(), inputs.tolist(), outputs.tolist(), strict=True))
    requests = [Request(number=n, arrival=at, input_tokens=i, output_tokens=o) for n, (at, i, o) in numbered]
    return Trace(name="mixed", requests=requests)


def run(given, policy=None, cost=ROOMY, **admission):
    return simulate(given, cost, policy or Heuristic(), 0.02, AdmissionConfig(**admission))


def test_chunks_lower_tail_tbt_and_raise_ttft():
    whole, cut = (summary(run(trace(), max_batch_size=8, prefill_chunk_tokens=chunk)) for chunk in (0, 100))
    assert whole["tokens"] == cut["tokens"] and whole["requests"] == cut["requests"]
    assert cut["tbt_s"]["p99"] < whole["tbt_s"]["p99"] / 3 and cut["max_token_gap_s"] < whole["max_token_gap_s"] / 3
    assert cut["ttft_s"]["p50"] > whole["ttft_s"]["p50"]


def test_step_with_chunk_adds_both_times():
    requests = [Request(number=n, arrival=0.01 * n, input_tokens=250, output_tokens=30) for n in range(2)]
    served = run(Trace(name="two", requests=requests), prefill_chunk_tokens=100)
    first, second = served.sequences
    alone_s = ROOMY.compute.prefill_s(250)
    assert first.token_times_s[0] == pytest.approx(alone_s)  # no other request decodes
    assert second.entered_s == first.token_times_s[0]
    beside = [100, 100, 50]
    steps = [ROOMY.compute.decode_s(1, 251 + n) + ROOMY.compute.prefill_s(chunk) for n, chunk in enumerate(beside)]
    assert first.step_s[1:4] == pytest.approx(steps)
    assert second.token_times_s[0] == first.token_times_s[3] == pytest.approx(alone_s + sum(steps))
    assert served.prefill_s == pytest.approx(2 * alone_s)


@pytest.mark.parametrize("unit", ["s", "steps"])
@pytest.mark.parametrize("order", ["fcfs", "srtf"])
@pytest.mark.parametrize("policy", [FlexGenHalf, partial(OrbitFlow, late=0), OrbitFlow])
def test_all_requests_get_all_tokens(unit, order, policy):
    requests = trace(40, longest=400)
    if unit == "steps":
        requests = replace(
            requests, unit="steps", requests=[replace(r, arrival=int(50 * r.arrival)) for r in requests.requests]
        )
    served = run(requests, policy(), COST, prefill_chunk_tokens=64, order=order, max_batch_size=3)
    assert sorted(sequence.request.number for sequence in served.sequences) == list(range(40))
    for sequence in served.sequences:
        assert sequence.num_output_tokens == sequence.request.output_tokens == sequence.token_times_s.size
        assert (
            np.diff(sequence.token_times_s) > 0
        ).all() and sequence.arrived_s <= sequence.entered_s < sequence.token_times_s[0]
    assert served.end_s == pytest.approx(served.prefill_s + served.decode_s + served.idle_s)
    busy = [(sequence.entered_s, sequence.token_times_s[-1]) for sequence in served.sequences]
    assert max(sum(a <= begin < b for a, b in busy) for begin, _ in busy) <= 3


def work_s(request):
    return ROOMY.compute.prefill_s(request.input_tokens) + request.output_tokens * ROOMY.compute.linear_s()


def test_srtf_lowers_mean_and_starves_no_request():
    requests = trace(150, gap_s=0.12)
    first_come, shortest, aged = (
        run(requests, order=order, aging_factor=aging) for order, aging in (("fcfs", 0), ("srtf", 1e6), ("srtf", 3.0))
    )
    totals = [summary(result) for result in (first_come, shortest, aged)]
    assert totals[1]["ttft_s"]["p50"] < totals[0]["ttft_s"]["p50"] / 2
    assert totals[0]["max_queue_wait_s"] < totals[2]["max_queue_wait_s"] < totals[1]["max_queue_wait_s"]
    for one, other in combinations(aged.sequences, 2):  # in the order in which they entered
        if one.arrived_s > other.arrived_s:
            assert one.arrived_s < other.arrived_s + 3 * work_s(other.request)


def test_srtf_with_aging_0_equals_fcfs():
    orders = [
        [sequence.request.number for sequence in run(trace(), order=o, aging_factor=0).sequences]
        for o in ("fcfs", "srtf")
    ]
    assert orders[0] == orders[1] == sorted(orders[0])


def test_no_pause_is_longer_than_patience():
    """One long request among short ones that keep arriving, with no time for both."""
    lengths = [(300, 50), *[(30, 40)] * 20]
    requests = [
        Request(number=n, arrival=0.1 * n, input_tokens=prompt, output_tokens=output)
        for n, (prompt, output) in enumerate(lengths)
    ]
    long = Trace(name="long and short", requests=requests)
    tight = replace(COST, room_blocks=18)
    served = [
        simulate(long, tight, OrbitFlow(late=0), 0.0101, AdmissionConfig(max_batch_size=3, max_paused_steps=patience))
        for patience in (None, 1 << 30, 16)
    ]
    patient, endless, bound = map(summary, served)
    assert patient == endless and bound["tokens"] == patient["tokens"]
    assert patient["max_token_gap_s"] > 4  # until no short one is left
    assert bound["max_token_gap_s"] < 1


def test_a_queue_that_is_full_rejects():
    requests = [Request(number=n, arrival=0, input_tokens=50, output_tokens=20) for n in range(9)]
    served = run(Trace(name="burst", requests=requests), max_batch_size=2, max_queued_requests=3)
    assert [request.number for request, _ in served.rejected] == [5, 6, 7, 8]  # two have slots at once
    totals = summary(served)
    assert totals["requests"] == 5 and totals["rejected"] == 4 and totals["reject_reasons"] == {FULL: 4}
    assert totals["deadline_attainment_incl_rejected"] == pytest.approx(totals["deadline_attainment"] * 5 / 9)


def test_too_long_request_ends_run_or_is_rejected():
    requests = [Request(number=n, arrival=n, input_tokens=n * 3000 + 10, output_tokens=5) for n in range(2)]
    long = Trace(name="long", requests=requests)
    with pytest.raises(ValueError, match="request 1: 3,014 tokens"):
        run(long, cost=COST)
    served = run(long, cost=COST, reject=True)
    assert [sequence.request.number for sequence in served.sequences] == [0]
    assert served.rejected == [(requests[1], TOO_LONG)]


def test_a_run_in_which_all_are_rejected():
    alone = Trace(name="long", requests=[Request(number=0, arrival=0, input_tokens=9000, output_tokens=5)])
    totals = summary(run(alone, cost=COST, reject=True))
    assert (
        totals["requests"],
        totals["rejected"],
        totals["tokens_per_s"],
        totals["deadline_attainment_incl_rejected"],
    ) == (0, 1, 0, 0)


def test_path_bytes_are_counted_by_path():
    requests = [Request(number=0, arrival=0, input_tokens=100, output_tokens=4)]
    served = run(Trace(name="one", requests=requests), FlexGenHalf(), ROOMY)
    layer_tokens = 4 * (101 + 102 + 103)  # half of eight layers, in three steps
    assert summary(served)["path_bytes"] == {"host_link": layer_tokens * ROOMY.token_bytes, "drives": 0}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"prefill_chunk_tokens": -1}, "prefill_chunk_tokens"),
        ({"order": "random"}, "order"),
        ({"aging_factor": -0.1}, "aging_factor"),
        ({"max_queued_requests": 0}, "max_queued_requests"),
        ({"max_paused_steps": 0}, "max_paused_steps"),
    ],
)
def test_invalid_admission_is_one_line_error(given, says):
    with pytest.raises(ValueError, match=says) as raised:
        AdmissionConfig(**given)
    assert "\n" not in str(raised.value)
