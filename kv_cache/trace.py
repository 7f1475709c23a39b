"""Request traces, and a generator of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        number: Index in the trace.
        arrival: Arrival in the trace's unit, seconds or engine steps.
        input_tokens, output_tokens: Lengths of prompt and output.
        hashes: Hashes of the prompt's blocks of `Trace.block_tokens` tokens; equal for equal prefixes.
    """

    number: int
    arrival: float
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in the KV cache at the end: the last output token is never an input."""
        return self.input_tokens + self.output_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        unit: Unit of arrivals.
        block_tokens: Tokens per prefix hash; 0: no hashes.
        slo_tokens: Length of the longest request that fits on the device, if the trace has it.
        source: Columns and units that were read from a file, in words.
    """

    name: str
    requests: Sequence[Request]
    unit: Literal["s", "steps"] = "s"
    block_tokens: int = 0
    slo_tokens: int | None = None
    source: str = ""

    @property
    def duration(self) -> float:
        """Time that the trace covers, in its unit: its gaps plus the mean gap; 0 if all requests arrive at once."""
        count, requests = len(self.requests), self.requests
        return (requests[-1].arrival - requests[0].arrival) * count / max(1, count - 1)

    def head(self, count: int) -> Trace:
        """The first `count` requests; 0: all."""
        return replace(self, requests=self.requests[:count]) if count else self

    def in_seconds(self, step_s: float) -> Trace:
        """Copy with arrivals in seconds, for an engine step of `step_s`."""
        if self.unit == "s":
            return self
        return replace(
            self, requests=[replace(request, arrival=request.arrival * step_s) for request in self.requests], unit="s"
        )


MOONCAKE_BLOCK, ORBITFLOW_BLOCK = 512, 16  # tokens


def generate(
    count: int,
    rate: float,
    input_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    cv: float | None = None,
    seed: int = 0,
    longest: int = 1 << 24,
) -> Trace:
    """Generate requests with random arrivals and log-uniform lengths.

    Args:
        count: Number of requests.
        rate: Requests per second.
        input_tokens: Shortest and longest prompt, tokens.
        output_tokens: Shortest and longest output, tokens.
        cv: Coefficient of variation of lognormal gaps; None: a Poisson process.
        seed: Random seed.
        longest: Maximum total length of a request, tokens; the output of longer ones is cut.
    """
    generator = np.random.default_rng(seed)
    if cv is None:
        waits = generator.exponential(1 / rate, count)
    else:
        sigma = math.sqrt(math.log1p(cv * cv))
        waits = generator.lognormal(-math.log(rate) - sigma * sigma / 2, sigma, count)
    arrivals = np.cumsum(waits) - waits[0]
    lengths = [
        np.exp(generator.uniform(math.log(ends[0]), math.log(ends[1]), count)).round()
        for ends in (input_tokens, output_tokens)
    ]
    requests = [
        Request(
            number=number,
            arrival=float(at),
            input_tokens=int(input_length),
            output_tokens=max(1, min(int(output_length), longest - int(input_length))),
        )
        for number, (at, input_length, output_length) in enumerate(zip(arrivals, *lengths, strict=True))
    ]
    return Trace(name=f"generated, {rate:g}/s", requests=requests)
