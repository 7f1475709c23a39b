"""Metrics of a run whose times are known."""

import numpy as np
import pytest

from kv_cache.metrics import RunResult, summary
from kv_cache.request import SequenceState
from kv_cache.trace import Request


def sequence(number, arrived_s, entered_s, times_s, steps_s):
    request = Request(number=number, arrival=arrived_s, input_tokens=9, output_tokens=len(times_s))
    bursts = [(np.array(times_s), np.array(steps_s))]
    return SequenceState(request, arrived_s, bursts, len(times_s), entered_s=entered_s)


@pytest.fixture
def served():
    """Of the first request a token is late by its step, of the second one by a pause; the third has one token."""
    return RunResult(
        slo_s=1.0,
        sequences=[
            sequence(0, 10.0, 11.0, [12.0, 13.0, 15.0, 15.5], [1.0, 1.0, 2.0, 0.5]),
            sequence(1, 20.0, 24.0, [25.0, 28.0], [1.0, 0.5]),
            sequence(2, 30.0, 30.0, [31.0], [1.0]),
        ],
        rejected=[(Request(number=3, arrival=0, input_tokens=9, output_tokens=3), "full")],
        end_s=50.0,
        steps=6,
        link_bytes=70.0,
        drive_bytes=80.0,
    )


def test_summary_of_a_run(served):
    totals = summary(served)
    counts = ("requests", "steps", "rejected", "reject_reasons", "tokens", "slo_s", "makespan_s")
    assert [totals[name] for name in counts] == [3, 6, 1, {"full": 1}, 7, 1.0, 50.0]
    assert totals["path_bytes"] == {"host_link": 70.0, "drives": 80.0}
    assert totals["tbt_slo_attainment_step"] == 3 / 4
    assert totals["tbt_slo_attainment_buffered"] == 3 / 4
    assert totals["tbt_slo_attainment"] == 2 / 4
    assert totals["deadline_attainment"] == 1 / 4, "the fourth token of the first is half a second late"
    assert totals["deadline_attainment_incl_rejected"] == pytest.approx(1 / 4 * 7 / 10)
    assert totals["tpot_slo_attainment_step"] == 1 / 2, "means of 3.5 / 3 and 0.5 seconds"
    assert totals["tpot_slo_attainment"] == 0
    assert totals["ttft_s"]["p50"] == 2.0 and totals["step_s"]["p50"] == 0.75 and totals["tbt_s"]["p50"] == 1.5
    assert totals["tpot_s"]["p50"] == pytest.approx((3.5 / 3 + 3) / 2)
    assert totals["step_tpot_s"]["p50"] == pytest.approx((3.5 / 3 + 0.5) / 2)
    assert (totals["max_queue_wait_s"], totals["max_token_gap_s"]) == (4.0, 3.0)
    assert totals["end_to_end_s"] == pytest.approx((5.5 + 8 + 1) / 3)
    assert (totals["requests_per_min"], totals["tokens_per_s"]) == pytest.approx((60 * 3 / 50, 7 / 50))


def test_summary_of_nothing():
    totals = summary(RunResult(slo_s=1.0))
    assert all(totals[name] == 1 for name in totals if name.startswith(("tbt_slo", "tpot_slo")))
    for name in ("deadline_attainment", "end_to_end_s", "requests_per_min", "tokens_per_s", "max_token_gap_s"):
        assert totals[name] == 0
    assert totals["ttft_s"] == {"p50": 0.0, "p95": 0.0, "p99": 0.0}
