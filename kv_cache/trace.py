"""Request traces: readers of published formats, and a generator."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from csd_spec.checked import from_values, lenient_value

Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


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
    """

    name: str
    requests: Sequence[Request]
    unit: Literal["s", "steps"] = "s"
    block_tokens: int = 0
    slo_tokens: int | None = None

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
            self, requests=[replace(each, arrival=each.arrival * step_s) for each in self.requests], unit="s"
        )


@lenient_value
class _Splitwise:
    arrived_at: Seconds
    num_prefill_tokens: Tokens
    num_decode_tokens: Tokens


@lenient_value
class _Mooncake:
    timestamp: Annotated[int, Field(ge=0)]  # ms
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]


@lenient_value
class _OrbitFlow:
    input_tokens: Tokens
    output_tokens: Tokens
    arrival_step: Annotated[int, Field(ge=0)]


MOONCAKE_BLOCK, ORBITFLOW_BLOCK = 512, 16  # tokens


def load(path: Path, name: str = "") -> Trace:
    """Load a trace; detects Splitwise's CSV, Mooncake's JSON lines and OrbitFlow's JSON.

    Args:
        path: File.
        name: Name, or part of the name, of one of several traces in the file; default: the first one.

    Raises:
        ValueError: A record is incomplete, has a value out of range, or arrives before the previous one (OrbitFlow's
            are sorted). The message has one line.
    """
    if path.is_char_device():  # such as /dev/zero, which never ends
        raise ValueError(f"trace {path}: is a device, not a file")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    if path.suffix == ".csv":
        return _sorted_trace(path, [_splitwise(*each) for each in _rows(path, text)])
    try:
        if path.suffix == ".jsonl":
            return _sorted_trace(path, [_mooncake(*each) for each in _lines(path, text)], block_tokens=MOONCAKE_BLOCK)
        return _orbitflow(path, json.loads(text), name)
    except RecursionError:
        raise ValueError(f"trace {path}: is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"trace {path}: line {error.lineno} is not valid JSON: {error.msg}") from None


def _rows(path: Path, text: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for number, row in enumerate(csv.DictReader(text.splitlines())):
        yield f"trace {path}: line {number + 2}", number, {key: _number(value) for key, value in row.items() if key}


def _number(text: object) -> object:
    try:
        return float(str(text)) if "." in str(text) else int(str(text))
    except ValueError:
        return text


def _lines(path: Path, text: str) -> Iterator[tuple[str, int, Any]]:
    number = 0
    for at, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"trace {path}: line {at}", number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"trace {path}: line {at} is not valid JSON: {error.msg}") from None
            number += 1


def _read(where: str, values: Any, kind: type[Any]) -> Any:
    try:
        return from_values(values, kind)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _splitwise(where: str, number: int, values: Any) -> Request:
    found = _read(where, values, _Splitwise)
    return Request(
        number=number,
        arrival=float(found.arrived_at),
        input_tokens=found.num_prefill_tokens,
        output_tokens=found.num_decode_tokens,
    )


def _mooncake(where: str, number: int, values: Any) -> Request:
    found = _read(where, values, _Mooncake)
    return Request(
        number=number,
        arrival=found.timestamp / 1000,
        input_tokens=found.input_length,
        output_tokens=found.output_length,
        hashes=tuple(found.hash_ids),
    )


def _orbitflow(path: Path, found: Any, name: str) -> Trace:
    if not isinstance(found, dict) or not found:
        raise ValueError(f"trace {path}: must be an object of traces by name")
    chosen = next((each for each in found if name in each), None)
    if chosen is None:
        raise ValueError(f"trace {path}: {name!r}: must be one of {', '.join(found)}")
    where, trace = f"trace {path}: {chosen}", found[chosen]
    if not isinstance(trace, dict) or not isinstance(trace.get("requests"), list):
        raise ValueError(f"{where}: has no list `requests`")
    requests = []
    for number, each in enumerate(trace["requests"]):
        one = _read(f"{where}: requests[{number}]", each, _OrbitFlow)
        requests.append(
            Request(
                number=number,
                arrival=one.arrival_step,
                input_tokens=one.input_tokens,
                output_tokens=one.output_tokens,
            )
        )
    blocks = trace.get("slo_base_blocks")
    if blocks is not None and (not isinstance(blocks, int) or blocks < 1):
        raise ValueError(f"{where}: slo_base_blocks = {blocks!r}: must be a whole number, at least 1")
    requests.sort(key=lambda each: each.arrival)
    slo_tokens = blocks * ORBITFLOW_BLOCK if blocks else None
    return Trace(name=chosen, requests=requests, unit="steps", slo_tokens=slo_tokens)


def _sorted_trace(path: Path, requests: list[Request], block_tokens: int = 0) -> Trace:
    if not requests:
        raise ValueError(f"trace {path}: has no requests")
    for before, after in pairwise(requests):
        if after.arrival < before.arrival:
            raise ValueError(f"trace {path}: request {after.number} arrives before the previous one: sort the file")
    return Trace(name=path.stem, requests=requests, block_tokens=block_tokens)


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
            input_tokens=int(given),
            output_tokens=max(1, min(int(made), longest - int(given))),
        )
        for number, (at, given, made) in enumerate(zip(arrivals, *lengths, strict=True))
    ]
    return Trace(name=f"generated, {rate:g}/s", requests=requests)
