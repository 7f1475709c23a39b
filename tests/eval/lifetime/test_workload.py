"""Samples of a trace: new content except for system prompts, the rate of the trace, the same for the same seed."""

import pytest

from kv_cache.trace import Request, Trace
from vcsd_eval.lifetime.workload import conversations, make_day

SYSTEM = 7


def trace_of(hashes, block=512):
    requests = [
        Request(number=at, arrival=30.0 * at, input_tokens=512 * max(1, len(each)), output_tokens=5, hashes=each)
        for at, each in enumerate(hashes)
    ]
    return Trace(name="small", requests=requests, block_tokens=block)


TRACE = trace_of([(SYSTEM, 10 * at // 2, *range(1000 * at, 1000 * at + 3)) for at in range(120)])


def test_conversations_share_more_than_system_prompt():
    trace = trace_of([(SYSTEM, 1), (SYSTEM, 2), (SYSTEM, 1, 3), (SYSTEM, 4)])
    result, shared = conversations(trace)
    assert shared == {SYSTEM}
    assert [[each.number for each in one] for one in result] == [[0, 2], [1], [3]]


def test_day_renames_content_and_keeps_system_prompt():
    visits = make_day(TRACE, hours=3, fraction=0.5, seed=0).visits
    assert {visit.keys[0] for visit in visits} == {(0, SYSTEM)}
    assert len({visit.keys[2] for visit in visits}) == len(visits)
    assert [visit.arrival_s for visit in visits] == sorted(visit.arrival_s for visit in visits)


def test_day_has_rate_of_trace():
    visits = make_day(TRACE, hours=24, fraction=0.5, seed=0).visits
    assert len(visits) == pytest.approx(24 * 120 * 0.5, rel=0.05)


def test_day_depends_only_on_seed():
    days = [make_day(TRACE, 2, 0.5, seed) for seed in (1, 1, 2)]
    assert days[0] == days[1] != days[2]


def test_day_without_hashes_shares_nothing():
    visits = make_day(trace_of([()] * 50, block=0), 1, 1, 0).visits
    keys = [key for visit in visits for key in visit.keys]
    assert len(set(keys)) == len(keys) > 0


def test_day_without_requests_raises_with_remedy():
    with pytest.raises(ValueError, match="take a smaller --scale"):
        make_day(trace_of([(1,)]), 0.01, 1e-6, 0)
