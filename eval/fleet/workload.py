"""Hours of requests from a public trace: its arrivals again and again, its lengths drawn with repetition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csd_spec.arrays import F64, I64
from kv_cache.trace import Trace

MAX_REQUESTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in order of arrival, (R,) each."""

    arrival_s: F64
    input_tokens: I64
    output_tokens: I64


def period_s(trace: Trace) -> float:
    """Time after which the trace is repeated; an hour if all of it comes at once."""
    return trace.duration or 3600.0


def hours_of(trace: Trace, hours: float, rate: float, seed: int) -> Arrivals:
    """The trace, and as often as it takes its arrivals with lengths that are drawn from it with repetition.

    Args:
        trace: Arrivals in seconds.
        hours: Length of the result.
        rate: Arrivals a second over those of the trace.
        seed: Of the draws.

    Raises:
        ValueError: Too many requests.
    """
    generator, count, period = np.random.default_rng(seed), len(trace.requests), period_s(trace) / rate
    at = np.array([each.arrival for each in trace.requests])
    at = (at - at[0]) / rate
    tokens = np.array([(each.input_tokens, each.output_tokens) for each in trace.requests])
    repeats = int(np.ceil(hours * 3600 / period))
    if repeats * count > MAX_REQUESTS:
        raise ValueError(
            f"{repeats * count:,} requests, at most {MAX_REQUESTS:,}: take fewer --hours or a lower --rate"
        )
    arrival_s = np.concatenate([at + number * period for number in range(repeats)])
    drawn = [np.arange(count), *(generator.integers(0, count, count) for _ in range(repeats - 1))]
    kept = arrival_s < hours * 3600
    lengths = tokens[np.concatenate(drawn)[kept]]
    return Arrivals(arrival_s[kept], lengths[:, 0].copy(), lengths[:, 1].copy())


def backlog(trace: Trace, count: int, seed: int) -> Arrivals:
    """Requests drawn from the trace that all wait from the beginning."""
    drawn = np.random.default_rng(seed).integers(0, len(trace.requests), count)
    tokens = np.array([(each.input_tokens, each.output_tokens) for each in trace.requests])[drawn]
    return Arrivals(np.zeros(count), tokens[:, 0].copy(), tokens[:, 1].copy())
