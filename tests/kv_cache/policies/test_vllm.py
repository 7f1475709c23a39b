"""partner of: kv_cache/policies/vllm.py"""

from dataclasses import replace

import pytest

from kv_cache.admission import AdmissionConfig
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.policies import policy_of
from kv_cache.simulation import simulate
from kv_cache.trace import Request, Trace
from vcsd_eval.serving.machines import A5000

LONG = 64 * BLOCK_TOKENS


def served(room_blocks, prompts=(LONG, LONG, LONG), output_tokens=2 * BLOCK_TOKENS):
    """Requests that arrive together, on a device with room for `room_blocks` blocks of a layer."""
    requests = [
        Request(number=number, arrival=0.0, input_tokens=tokens, output_tokens=output_tokens)
        for number, tokens in enumerate(prompts)
    ]
    cost = replace(A5000, room_blocks=room_blocks)
    trace = Trace(name="t", requests=requests, unit="seconds")
    return simulate(trace, cost, policy_of("vllm"), cost.slo_s(1.0), AdmissionConfig(max_batch_size=4))


def ends(result):
    return {sequence.number: float(sequence.token_times_s[-1]) for sequence in result.sequences}


def test_requests_with_room_decode_together():
    result = served(4 * 66)
    assert len(set(ends(result).values())) == 1
    assert result.steps == 2 * BLOCK_TOKENS - 1


def test_preempted_request_is_prefilled_again_and_ends_last():
    """Prompts of two requests fit, their outputs do not: the last one starts again when the first has finished."""
    roomy, tight = served(4 * 66, (LONG, LONG)), served(2 * 65, (LONG, LONG))
    assert all(sequence.finished for sequence in tight.sequences)
    first, second = ends(tight).values()
    assert first < second
    assert tight.prefill_s > roomy.prefill_s * 1.4
    assert tight.link_bytes == 0


def test_requests_are_served_in_the_order_of_their_arrival():
    """A short prompt does not pass a long one that waits."""
    order = ends(served(100, (LONG, LONG, BLOCK_TOKENS)))
    assert order[0] < order[1] <= order[2]


def test_request_that_never_fits_is_an_error():
    with pytest.raises(RuntimeError, match="does not fit on the device"):
        served(40, (LONG,))
