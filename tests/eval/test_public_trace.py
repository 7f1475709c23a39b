"""The default trace of experiments."""

from pathlib import Path

import pytest

from kv_cache.trace import Request, Trace
from vcsd_eval.public_trace import public_trace


def test_missing_trace_error_has_remedy(monkeypatch):
    monkeypatch.delenv("VCSD_DATA", raising=False)
    with pytest.raises(ValueError, match="--trace is missing: name a trace"):
        public_trace(None)


def test_arrivals_in_steps_are_refused(monkeypatch):
    monkeypatch.setattr("vcsd_eval.public_trace.read_trace", lambda path: Trace(name="made", requests=[], unit="steps"))
    with pytest.raises(ValueError, match="arrivals must be in seconds"):
        public_trace(Path("made.json"))


@pytest.mark.parametrize(("arrivals", "duration"), [([5], 0), ([0, 10], 20), ([1, 2, 3], 3)])
def test_duration_has_one_gap_more_than_the_trace(arrivals, duration):
    requests = [Request(number=n, arrival=at, input_tokens=1, output_tokens=1) for n, at in enumerate(arrivals)]
    assert Trace(name="made", requests=requests).duration == duration
