"""Hours from a short trace: the trace first, then draws of the same seed."""

import numpy as np
import pytest

from eval.fleet.workload import backlog, hours_of, period_s


def test_first_period_is_trace(trace):
    found = hours_of(trace, 2, 1.0, seed=0)
    count = len(trace.requests)
    assert found.input_tokens[:count].tolist() == [each.input_tokens for each in trace.requests]
    assert found.arrival_s.max() < 7200 and (np.diff(found.arrival_s) >= 0).all()
    assert set(found.input_tokens.tolist()) <= {each.input_tokens for each in trace.requests}


def test_rate_divides_gaps(trace):
    assert period_s(trace) == pytest.approx(2400)
    one, two = (hours_of(trace, 4, rate, seed=0).arrival_s.size for rate in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.01)


def test_seed_decides_draws(trace):
    one, same, other = (backlog(trace, 100, seed).input_tokens.tolist() for seed in (1, 1, 2))
    assert one == same != other
