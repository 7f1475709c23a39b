"""Serving metrics: SLO attainment by step times as OrbitFlow counts, by time between tokens, and by deadlines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from csd_spec.arrays import F64
from kv_cache.request import SequenceState
from kv_cache.trace import Request


@dataclass(slots=True, kw_only=True)
class RunResult:
    """Totals and requests of a run.

    Attributes:
        slo_s: Objective, seconds per token.
        sequences: Admitted requests.
        rejected: Rejected requests and the reason.
        end_s: Simulated time at the end.
        steps: Decode steps.
        decided: Iterations that the policy decided.
        prefill_s, decode_s, idle_s: Simulated seconds in each state.
        stalled_s: Seconds in which requests were queued and none ran.
        fetched_layers, attended_layers: Layers of requests copied over the link, and attended in drives.
        link_bytes, drive_bytes: Bytes of the KV cache copied over the link, and read in drives.
        timed_by: Iterations by the method of their timing (`IterationResult.timed_by`).
    """

    slo_s: float
    sequences: list[SequenceState] = field(default_factory=list)
    rejected: list[tuple[Request, str]] = field(default_factory=list)
    end_s: float = 0.0
    steps: int = 0
    decided: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    stalled_s: float = 0.0
    fetched_layers: int = 0
    attended_layers: int = 0
    link_bytes: float = 0.0
    drive_bytes: float = 0.0
    timed_by: dict[str, int] = field(default_factory=dict)


def attained(served: RunResult, deposit: bool = False) -> float:
    """Fraction of tokens in time, counted as in OrbitFlow's scripts.

    The time of a token is that of the step that produced it, without earlier pauses or prefills.

    Args:
        served: The run.
        deposit: Tokens produced early compensate later ones.
    """
    late = total = 0
    for live in served.sequences:
        steps = live.step_s[1:]
        total += steps.size
        late += _late(steps, served.slo_s) if deposit else int((steps > served.slo_s).sum())
    return 1 - late / max(1, total)


def _late(gaps: F64, slo_s: float) -> int:
    """Tokens produced when the deposit is empty; the clock restarts at each of them."""
    late, due, produced_s = 0, slo_s, 0.0
    for gap in gaps.tolist():
        produced_s += gap
        if produced_s > due + 1e-12:
            late += 1
            due = produced_s
        due += slo_s
    return late


def tbt_slo_attainment(served: RunResult) -> float:
    """Fraction of tokens in time by time between tokens, including pauses and prefills of other requests."""
    gaps = _gaps(served.sequences)
    return float((gaps <= served.slo_s).mean()) if gaps.size else 1.0


def deadline_attainment(served: RunResult) -> float:
    """Fraction of tokens available when a user reads them: token i is due i objectives after the first one."""
    met = total = 0
    for live in served.sequences:
        times_s = live.token_times_s
        due = times_s[0] + served.slo_s * np.arange(times_s.size)
        met += int((times_s[1:] <= due[1:] + 1e-9).sum())
        total += times_s.size - 1
    return met / max(1, total)


def deadline_attainment_incl_rejected(served: RunResult) -> float:
    """`deadline_attainment`, with all tokens of rejected requests counted as late."""
    admitted = sum(sequence.num_output_tokens for sequence in served.sequences)
    lost = sum(request.output_tokens for request, _ in served.rejected)
    return deadline_attainment(served) * admitted / max(1, admitted + lost)


def tpot_slo_attainment_step(served: RunResult, real: bool = False) -> float:
    """Fraction of requests whose mean step, or (`real`) mean time between tokens, is within the objective."""
    means = _tpot(served.sequences, real)
    return float((means <= served.slo_s).mean()) if means.size else 1.0


def _gaps(live: Sequence[SequenceState]) -> F64:
    return np.concatenate([np.diff(sequence.token_times_s) for sequence in live] or [np.zeros(0)])


def _tpot(live: Sequence[SequenceState], real: bool) -> F64:
    several = [sequence for sequence in live if sequence.num_output_tokens > 1]
    return np.array([np.mean(np.diff(sequence.token_times_s) if real else sequence.step_s[1:]) for sequence in several])


def _percentiles(values: F64) -> dict[str, float]:
    percentiles = np.percentile(values, (50, 95, 99)) if values.size else (0.0, 0.0, 0.0)
    return {name: float(value) for name, value in zip(("p50", "p95", "p99"), percentiles, strict=True)}


def summary(served: RunResult) -> dict[str, Any]:
    """All metrics of a run, in seconds, fractions and bytes.

    `max_queue_wait_s` is the longest time in the queue, `max_token_gap_s` the longest time between two tokens.
    `path_bytes` has the bytes of the KV cache over the link to the host and read in drives.
    """
    live = served.sequences
    steps = np.concatenate([np.zeros(0), *(sequence.step_s[1:] for sequence in live)])
    tokens, span_s = sum(sequence.num_output_tokens for sequence in live), served.end_s or math.inf
    first = np.array([sequence.token_times_s[0] - sequence.arrived_s for sequence in live])
    whole = np.array([sequence.token_times_s[-1] - sequence.arrived_s for sequence in live])
    return {
        "requests": len(live),
        "steps": served.steps,
        "rejected": len(served.rejected),
        "reject_reasons": dict(Counter(reason for _, reason in served.rejected)),
        "tokens": tokens,
        "slo_s": served.slo_s,
        "tbt_slo_attainment_step": attained(served),
        "tbt_slo_attainment_buffered": attained(served, deposit=True),
        "tbt_slo_attainment": tbt_slo_attainment(served),
        "tpot_slo_attainment_step": tpot_slo_attainment_step(served),
        "tpot_slo_attainment": tpot_slo_attainment_step(served, real=True),
        "deadline_attainment": deadline_attainment(served),
        "deadline_attainment_incl_rejected": deadline_attainment_incl_rejected(served),
        "step_s": _percentiles(steps),
        "tbt_s": _percentiles(_gaps(live)),
        "step_tpot_s": _percentiles(_tpot(live, False)),
        "tpot_s": _percentiles(_tpot(live, True)),
        "ttft_s": _percentiles(first),
        "max_queue_wait_s": max((sequence.entered_s - sequence.arrived_s for sequence in live), default=0.0),
        "max_token_gap_s": float(_gaps(live).max(initial=0.0)),
        "end_to_end_s": float(whole.mean()) if live else 0.0,
        "requests_per_min": 60 * len(live) / span_s,
        "tokens_per_s": tokens / span_s,
        "path_bytes": {"host_link": served.link_bytes, "drives": served.drive_bytes},
        "makespan_s": served.end_s,
    }
