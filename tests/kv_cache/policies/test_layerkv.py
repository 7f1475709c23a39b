"""LayerKV: a prompt waits only for room for the layers kept during decode, not for all of its layers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kv_cache.admission import AdmissionConfig
from kv_cache.limits import TierLimits
from kv_cache.planner.problem import BLOCK_TOKENS, Offload
from kv_cache.policies import policy_of
from kv_cache.policies.layerkv import hidden_layers, offloads
from kv_cache.request import SequenceState
from kv_cache.scheduler import SchedulerState
from kv_cache.simulation import engine_for
from kv_cache.trace import Request, Trace
from vcsd_eval.serving.machines import A5000

PROMPT, OUTPUT, REQUESTS = 64 * BLOCK_TOKENS, 32, 6
SHORT = replace(A5000, room_blocks=2 * 70)  # two requests of six


def served(name: str, slo_s: float = math.inf):
    requests = [Request(number=n, arrival=0.01 * n, input_tokens=PROMPT, output_tokens=OUTPUT) for n in range(REQUESTS)]
    device = int(SHORT.room_blocks * BLOCK_TOKENS * SHORT.layers * SHORT.token_bytes)
    tiers = TierLimits(device, page_cache=device)
    trace = Trace(name="t", requests=requests, unit="seconds")
    return engine_for(trace, SHORT, policy_of(name), slo_s, AdmissionConfig(max_batch_size=REQUESTS), tiers).run()


def first_token_s(name: str) -> float:
    """Mean seconds from arrival to the first token."""
    return sum(sequence.token_times_s[0] - sequence.arrived_s for sequence in served(name).sequences) / REQUESTS


def test_ttft_lower_than_whole_requests_and_files():
    layerkv, vllm, flexgen = map(first_token_s, ("layerkv", "vllm", "flexgen"))
    assert layerkv < 0.6 * vllm
    assert layerkv <= flexgen


def state(requests, **more) -> SchedulerState:
    values = {"cost": SHORT, "sequences": requests, "slo_s": math.inf, "now_s": 1.0, "step": 0, "changed": True}
    return SchedulerState(**values | more)


def sequences(count: int) -> list[SequenceState]:
    requests = [Request(number=n, arrival=0.0, input_tokens=PROMPT, output_tokens=OUTPUT) for n in range(count)]
    return [SequenceState(request, 0.0) for request in requests]


def test_latest_requests_are_offloaded_first():
    """No more of their layers are offloaded than necessary."""
    assert offloads(state([]), sequences(2), SHORT.layers) == [Offload(0)] * 2
    counts = [offload.count for offload in offloads(state([]), sequences(3), SHORT.layers)]
    assert counts[:2] == [0, 0] and 0 < counts[2] <= SHORT.layers
    more = [offload.count for offload in offloads(state([]), sequences(5), SHORT.layers)]
    assert more == sorted(more) and more[-1] == SHORT.layers


def test_layers_kept_if_offload_not_hidden():
    (prompt,) = sequences(1)
    assert hidden_layers(state([]), prompt) == SHORT.layers
    slow = replace(SHORT, fetch_token_s=SHORT.compute.prefill_s(PROMPT) / PROMPT * 2)
    assert 0 < hidden_layers(state([], cost=slow), prompt) <= SHORT.layers // 2


@pytest.mark.parametrize(("slo_s", "prefills"), [(1e-3, False), (10.0, True)])
def test_prompt_waits_for_slo_of_decoding_requests(slo_s, prefills):
    running, prompt = sequences(2)
    running.num_computed_tokens = PROMPT
    running.add_tokens(np.array([0.5]), np.array([0.5]))
    output = policy_of("layerkv").schedule(state([running], filling=prompt, slo_s=slo_s))
    assert (prompt.number in output.num_scheduled_tokens) == prefills
    assert (running.number in output.num_scheduled_tokens) != prefills


def test_request_beyond_the_device_is_an_error():
    tiny = replace(SHORT, room_blocks=2)
    with pytest.raises(RuntimeError, match="does not fit on the device with all layers offloaded"):
        policy_of("layerkv").schedule(state(sequences(1), cost=tiny))
