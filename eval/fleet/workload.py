"""Hours of requests from a public trace, one period at a time: the trace, then conversations drawn from it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from csd_spec.arrays import F64, I64
from kv_cache.trace import Request, Trace
from vcsd_eval.lifetime.workload import conversations

MAX_REQUESTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of one period, in order of arrival.

    Attributes:
        arrival_s: Arrival since the beginning of the first period, (R,).
        input_tokens, output_tokens: Lengths of prompt and answer, (R,).
        blocks: Numbers of the prompts' full blocks, of all requests one after the other, (B,); equal numbers are equal
            prefixes. The first `shared` numbers are system prompts, which are the same in every period.
        block_ends: End of each request's part of `blocks`, (R,).
        block_tokens: Tokens of a block.
        shared: Number of system-prompt blocks.
    """

    arrival_s: F64
    input_tokens: I64
    output_tokens: I64
    blocks: I64
    block_ends: I64
    block_tokens: int = 1
    shared: int = 0

    @classmethod
    def without_prefixes(cls, arrival_s: F64, input_tokens: I64, output_tokens: I64) -> Arrivals:
        """Requests that share nothing."""
        return cls(arrival_s, input_tokens, output_tokens, np.zeros(0, np.int64), np.zeros(arrival_s.size, np.int64))

    @property
    def distinct_blocks(self) -> int:
        """Blocks with different content, and the system prompts."""
        return max(self.shared, int(self.blocks.max(initial=-1)) + 1)


def period_s(trace: Trace) -> float:
    """Time after which the trace is repeated; an hour if all requests arrive at once."""
    return trace.duration or 3600.0


class _Conversations:
    """A trace's requests by conversation, as arrays. Row n is a request; conversation c has rows starts[c]..ends[c]."""

    def __init__(self, trace: Trace) -> None:
        result, shared = conversations(trace)
        rows = [request for conversation in result for request in conversation]
        self.sizes: I64 = np.array([len(each) for each in result], np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.arrival_s: F64 = np.array([row.arrival for row in rows]) - trace.requests[0].arrival
        self.numbers: I64 = np.array([row.number for row in rows], np.int64)
        self.lengths: I64 = np.array([(row.input_tokens, row.output_tokens) for row in rows], np.int64)
        self.block_tokens, self.shared = trace.block_tokens or 1, len(shared)
        numbered, self.distinct = list[list[int]](), np.zeros(len(result), np.int64)
        common = {key: number for number, key in enumerate(sorted(shared))}
        for at, conversation in enumerate(result):
            own: dict[int, int] = {}
            for request in conversation:
                numbered.append([_number(key, common, own) for key in _full(request, self.block_tokens)])
            self.distinct[at] = len(own)
        self.block_counts: I64 = np.array([len(each) for each in numbered], np.int64)
        self.block_starts = np.cumsum(self.block_counts) - self.block_counts
        self.blocks: I64 = np.array([number for each in numbered for number in each], np.int64)

    def arrivals(self, chosen: I64, start_s: float, rate: float) -> Arrivals:
        """Requests of some conversations, which are new content each time but for system prompts.

        Args:
            chosen: Conversations, (C,).
            start_s: Beginning of the period.
            rate: Divides the time since then.
        """
        rows, owner = _ranges(self.starts[chosen], self.sizes[chosen])
        order = np.lexsort((self.numbers[rows], self.arrival_s[rows]))
        rows, owner = rows[order], owner[order]
        own = self.distinct[chosen]
        first = self.shared + np.cumsum(own) - own  # number of a conversation's first block of its own
        at, of_request = _ranges(self.block_starts[rows], self.block_counts[rows])
        local = self.blocks[at]
        blocks = np.where(local < 0, -1 - local, local + first[owner[of_request]]) if at.size else at
        ends = np.cumsum(self.block_counts[rows])
        lengths = self.lengths[rows]
        arrival_s = start_s + self.arrival_s[rows] / rate
        return Arrivals(
            arrival_s, lengths[:, 0].copy(), lengths[:, 1].copy(), blocks, ends, self.block_tokens, self.shared
        )


def _full(request: Request, block_tokens: int) -> tuple[int, ...]:
    """Hashes of the full blocks of a prompt, without that of its last token: this one is always computed."""
    return request.hashes[: (request.input_tokens - 1) // block_tokens]


def _number(key: int, common: dict[int, int], own: dict[int, int]) -> int:
    """A block's number: -1, -2, ... for system prompts, 0, 1, ... in its conversation."""
    return -1 - common[key] if key in common else own.setdefault(key, len(own))


def _ranges(starts: I64, sizes: I64) -> tuple[I64, I64]:
    """All numbers of ranges, one after the other, and the range of each."""
    owner = np.repeat(np.arange(sizes.size), sizes)
    return np.arange(sizes.sum()) - (np.cumsum(sizes) - sizes)[owner] + starts[owner], owner


def periods(trace: Trace, hours: float, rate: float, seed: int) -> Iterator[Arrivals]:
    """The trace as it is, then periods with as many of its conversations, drawn with repetition.

    Args:
        trace: Requests with arrivals in seconds.
        hours: Length of all periods together.
        rate: Arrivals per second over those of the trace.
        seed: Seed of the draws.

    Raises:
        ValueError: More than 2^24 requests.
    """
    generator, period = np.random.default_rng(seed), period_s(trace) / rate
    repeats = int(np.ceil(hours * 3600 / period))
    if (requests := repeats * len(trace.requests)) > MAX_REQUESTS:
        raise ValueError(f"{requests:,} requests, at most {MAX_REQUESTS:,}: take fewer --hours or a lower --rate")
    dialogues = _Conversations(trace)
    for number in range(repeats):
        count = dialogues.sizes.size
        chosen = generator.integers(0, count, count) if number else np.arange(count)
        yield _until(dialogues.arrivals(chosen, number * period, rate), hours * 3600)


def _until(arrivals: Arrivals, end_s: float) -> Arrivals:
    """The requests that arrive before the end."""
    count = int(np.searchsorted(arrivals.arrival_s, end_s))
    ends = arrivals.block_ends[:count]
    return Arrivals(
        arrivals.arrival_s[:count], arrivals.input_tokens[:count], arrivals.output_tokens[:count],
        arrivals.blocks[: int(ends[-1]) if count else 0], ends, arrivals.block_tokens, arrivals.shared,
    )  # fmt: skip


def backlog(trace: Trace, count: int, seed: int) -> Arrivals:
    """Requests drawn one by one from the trace, all waiting from the beginning; they share no prefixes."""
    drawn = np.random.default_rng(seed).integers(0, len(trace.requests), count)
    tokens = np.array([(request.input_tokens, request.output_tokens) for request in trace.requests])[drawn]
    return Arrivals.without_prefixes(np.zeros(count), tokens[:, 0].copy(), tokens[:, 1].copy())
