"""A day of requests from a public trace: its conversations are drawn again and again, each time as new content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_cache.trace import MOONCAKE_BLOCK, Request, Trace

SHARED = 0.5  # a block in more than this fraction of the requests is a system prompt, and not renamed

Key = tuple[int, int]  # number of the draw, 0 for shared blocks, and the block's hash


@dataclass(frozen=True, slots=True)
class Visit:
    """A request of the day.

    Attributes:
        arrival_s: Since the beginning of the day.
        keys: Blocks of its prompt; equal keys are equal prefixes. The last block may not be full.
        input_tokens: Length of the prompt.
        output_tokens: Length of the answer.
        turn: Requests of its conversation before it.
    """

    arrival_s: float
    keys: tuple[Key, ...]
    input_tokens: int
    output_tokens: int
    turn: int


@dataclass(frozen=True, slots=True)
class Day:
    """Requests in order of arrival, and the prompt tokens of a block."""

    visits: Sequence[Visit]
    block_tokens: int


def conversations(trace: Trace) -> tuple[list[list[Request]], frozenset[int]]:
    """Requests that share more than a system prompt, in order; and the hashes of system prompts.

    Requests of a trace without hashes are conversations of one request.
    """
    counts = Counter(each for request in trace.requests for each in request.hashes)
    shared = frozenset(key for key, count in counts.items() if count > max(1, SHARED * len(trace.requests)))
    result: dict[int, list[Request]] = {}
    for request in trace.requests:
        first = next((each for each in request.hashes if each not in shared), -1 - request.number)
        result.setdefault(first, []).append(request)
    return list(result.values()), shared


def make_day(trace: Trace, hours: float, fraction: float, seed: int) -> Day:
    """Draw a fraction of the trace's conversations, with repetition, for each of its durations.

    Args:
        trace: Arrivals in seconds.
        hours: Length of the result.
        fraction: Share of the trace's traffic, 0 to 1.
        seed: Seed of the draws: the same seed gives the same day.

    Raises:
        ValueError: No request is left.
    """
    dialogues, shared = conversations(trace)
    generator = np.random.default_rng(seed)
    block_tokens = trace.block_tokens or MOONCAKE_BLOCK
    start_s, duration_s = trace.requests[0].arrival, trace.duration or 3600.0
    visits, draw = list[Visit](), 0
    for hour in range(int(np.ceil(hours * 3600 / duration_s))):
        for which in generator.integers(
            0, len(dialogues), int(len(dialogues) * fraction + generator.random())
        ).tolist():
            draw += 1
            for turn, request in enumerate(dialogues[which]):
                hashes = request.hashes or range(-(-request.input_tokens // block_tokens))
                keys = tuple((0 if each in shared else draw, each) for each in hashes)
                at_s = hour * duration_s + request.arrival - start_s
                if at_s < hours * 3600:
                    visits.append(Visit(at_s, keys, request.input_tokens, request.output_tokens, turn))
    if not visits:
        raise ValueError(f"trace {trace.name}: 1/{1 / fraction:g} of it has no request: take a smaller --scale")
    return Day(sorted(visits, key=lambda visit: visit.arrival_s), block_tokens)
