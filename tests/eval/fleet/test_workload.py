"""Periods of a short trace: the trace first, then conversations of the same seed."""

from dataclasses import replace

import numpy as np
import pytest

from kv_cache.trace import Request, Trace
from vcsd_eval.fleet.workload import backlog, period_s, periods


def test_first_period_is_trace(trace):
    result, *_ = periods(trace, 2, 1.0, seed=0)
    assert result.input_tokens.tolist() == [request.input_tokens for request in trace.requests]
    assert result.arrival_s.tolist() == [request.arrival - trace.requests[0].arrival for request in trace.requests]


def test_periods_are_in_order_and_end(trace):
    arrival_s = np.concatenate([period.arrival_s for period in periods(trace, 2, 1.0, seed=0)])
    assert 7000 < arrival_s.max() < 7200 and (np.diff(arrival_s) >= 0).all()


def test_rate_divides_gaps(trace):
    assert period_s(trace) == pytest.approx(2400)
    one, two = (sum(period.arrival_s.size for period in periods(trace, 4, rate, seed=0)) for rate in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.01)


def test_seed_decides_draws(trace):
    one, same, other = (backlog(trace, 100, seed).input_tokens.tolist() for seed in (1, 1, 2))
    assert one == same != other
    one, same, other = (list(periods(trace, 2, 1, seed))[1].input_tokens.tolist() for seed in (1, 1, 2))
    assert one == same != other


@pytest.fixture
def talks():
    """Two conversations of two turns with one system prompt, and a request without it."""
    hashes = [(9, 1), (9, 5), (9, 1, 2), (9, 5, 6, 7), (30,)]
    requests = [
        Request(
            number=number, arrival=60.0 * number, input_tokens=16 * len(each) + 5, output_tokens=3, hashes=(*each, 99)
        )
        for number, each in enumerate(hashes)
    ]
    return Trace(name="talks", requests=requests, block_tokens=16)


def test_blocks_of_first_period_equal_trace(talks):
    (result,) = periods(talks, 300 / 3600, 1.0, seed=0)
    parts = [each.tolist() for each in np.split(result.blocks, result.block_ends[:-1])]
    assert [len(part) for part in parts] == [2, 2, 3, 4, 1]  # the last block of a prompt is not full
    assert result.shared == 2  # 99 is in all prompts, if only as their last block
    assert len({part[0] for part in parts[:4]}) == 1 and parts[0][0] < result.shared
    assert parts[2][:2] == parts[0] and parts[3][:2] == parts[1] and parts[0][1] != parts[1][1]
    assert result.distinct_blocks == result.shared + 6


def test_later_periods_are_new_content_but_for_system_prompt(talks):
    later = list(periods(talks, 1, 1.0, seed=0))[1:]
    assert len(later) > 5
    for each in later:
        own = each.blocks[each.blocks >= each.shared]
        assert own.size and own.max() < each.distinct_blocks
        sizes = np.diff(each.block_ends, prepend=0)
        assert ((each.input_tokens - 5) // 16 == sizes).all()


def test_too_many_requests_are_refused(trace):
    with pytest.raises(ValueError, match="take fewer --hours"):
        next(periods(replace(trace), 8784, 1000, seed=0))
