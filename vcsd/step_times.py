"""Simulated time of the same decode step with several attention methods, and with a plain SSD.

Each method gets new drives that store the same prompt. A step starts when their flash is idle, and the fastest of the
first ones programs no page, so its time depends neither on the length of the run nor on the prefill. Errors are means
over all recorded steps. The same steps after shorter parts of the prompt show from which context on attention in drives
is faster than reading the KV cache. Main entry point: `time_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table
from rich.text import Text

from attention_engine import load_methods
from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_spec import LAYOUTS, NAMED, AttentionConfig, CompressionBudget, FixedBudget, KvRead, Status
from csd_spec.arrays import F16
from csd_spec.units import ENGINE_UNITS, FLASH_UNITS
from host_driver.batch import Batch
from host_driver.driver import Driver
from host_driver.first_steps import FirstSteps
from host_driver.traffic import StepRecord
from vcsd.capacity_check import check_drives
from vcsd.tables import table
from vcsd.transport import check_method

PLAIN_SSD = "plain_ssd"
TIMED = 3  # timed steps; the fastest counts, since two in a row may each fill a group, which is then programmed
GROUPS = 8  # token groups per read of the plain SSD
PARTS = 16, 8, 4, 2  # the prompt is cut to these parts of it
SHORT_TOKENS = 256  # methods that select tokens have little to select from below that
BAR = 24  # characters of the longest bar of the chart

UNITS = {  # columns of the table, and the units of a completion's breakdown in each
    "flash": (*FLASH_UNITS, "flash_program"),
    "engine": ("queue", *ENGINE_UNITS),
    "link": ("link", "network"),
}
_DENSE = AttentionConfig("dense", CompressionBudget(1))
Devices = list[InProcessDrive]


@dataclass(slots=True)
class StepTimes:
    """One decode step by method; simulated time.

    Attributes:
        context_tokens: Stored tokens of the longest sequence.
        sequences: Sequences of the batch.
        layers_measured: Layers that were timed, evenly spread over the model; times are scaled to all of them.
        step_times_ns: Duration of the step, ns.
        output_errors: Mean of |output - dense| / |dense| over query heads, layers, sequences and recorded steps.
        budgets: Fraction of the KV cache that the method may use, as text.
        units_ns: Parts of the step by method: waiting for flash, the engine, and the link.
        by_context_ns: Durations by context and method, ascending; the last one is `step_times_ns`.
        faster_from_tokens: Context from which on a method is faster than the plain SSD, by interpolation between those
            of `by_context_ns`; 0: it is at the shortest one; None: it is not at any.
        left_out: Reason for each method that could not be timed.
    """

    context_tokens: int
    sequences: int
    layers_measured: int
    step_times_ns: dict[str, float] = field(default_factory=dict)
    output_errors: dict[str, float] = field(default_factory=dict)
    budgets: dict[str, str] = field(default_factory=dict)
    units_ns: dict[str, dict[str, float]] = field(default_factory=dict)
    by_context_ns: dict[int, dict[str, float]] = field(default_factory=dict)
    faster_from_tokens: dict[str, int | None] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __rich__(self) -> Group:
        rows = []
        for name, ns in self.step_times_ns.items():
            units = self.units_ns.get(name, {})
            parts = [f"{units[unit] / 1e3:,.1f}" if units else "" for unit in UNITS]
            error = f"{self.output_errors.get(name, nan):.3f}"
            rows.append((name, self.budgets[name], f"{ns / 1e3:,.1f}", *parts, error))
        columns = "method", "KV data used", "simulated us", *UNITS, "output error"
        shown = table(f"One decode step at {self.context_tokens:,} tokens", columns, rows, columns[:2])
        notes = [
            "output error: mean of |output - dense| / |dense| over query heads, in the first steps of this run; it "
            "differs by method, so their times do not compare like with like",
            "plain_ssd: the same flash and link; all KV data is read ahead, attention on the host takes no time",
            *(f"{name} is left out: {reason}" for name, reason in self.left_out.items()),
        ]
        return Group(shown, *map(Text, notes), *self._chart(), *map(Text, self._verdict()))

    def _chart(self) -> list[Table]:
        """Bars of step times by context; none for a single context."""
        if len(self.by_context_ns) < 2:
            return []
        names = list(self.step_times_ns)
        longest = max(max(times.values()) for times in self.by_context_ns.values())
        rows = []
        for context, times in self.by_context_ns.items():
            for name in names:
                bar = "#" * max(1, round(BAR * times[name] / longest))
                rows.append((f"{context:,}" if name == names[0] else "", name, f"{times[name] / 1e3:,.1f}", bar))
        columns = "tokens", "method", "simulated us", ""
        return [table("Decode step over context", columns, rows, columns[1::2])]

    def _verdict(self) -> list[str]:
        """What the comparison means, in a line each."""
        lines = []
        if self.context_tokens < SHORT_TOKENS:
            lines.append(
                f"{self.context_tokens} tokens are too few to compare methods: all read the same few pages, and "
                f"neither times nor errors hold for longer contexts: give a prompt of at least {SHORT_TOKENS} tokens"
            )
        for name, tokens in self.faster_from_tokens.items():
            if tokens is None:
                lines.append(f"{name} is slower than a plain SSD at all of these contexts")
            elif tokens:
                lines.append(f"{name} is faster than a plain SSD from about {tokens:,} tokens on")
            else:
                lines.append(f"{name} is faster than a plain SSD at all of these contexts")
        return lines


def time_steps(recorded: FirstSteps, name: str, own: AttentionConfig, methods: Path | None = None) -> StepTimes:
    """Time a step and compare outputs with dense attention, SparF, `ours`, the run's own method and a plain SSD.

    Contexts of at least `SHORT_TOKENS` are also timed in parts.

    Args:
        recorded: A prompt and its first steps.
        name: Name of the run's own method; replaces the entry with the same name.
        own: The run's own method and budget.
        methods: Python file with custom methods.
    """
    times = _times(recorded, name, own, methods)
    for part in PARTS if recorded.context_tokens >= SHORT_TOKENS else ():
        tokens = recorded.context_tokens // part
        shorter = _times(recorded.shortened(tokens), name, own, methods).step_times_ns
        if shorter.keys() == times.step_times_ns.keys():
            times.by_context_ns[tokens] = shorter
    times.by_context_ns[recorded.context_tokens] = times.step_times_ns
    if len(times.by_context_ns) > 1 and PLAIN_SSD in times.step_times_ns:
        others = [name for name in times.step_times_ns if name != PLAIN_SSD]
        times.faster_from_tokens = {name: _faster_from(times.by_context_ns, name) for name in others}
    return times


def _faster_from(by_context_ns: dict[int, dict[str, float]], name: str) -> int | None:
    """Context from which on a method is faster than the plain SSD, see `StepTimes`."""
    tokens = list(by_context_ns)
    behind = [times[name] - times[PLAIN_SSD] for times in by_context_ns.values()]
    if behind[-1] >= 0:
        return None
    last = next((number for number in reversed(range(len(behind))) if behind[number] >= 0), None)
    if last is None:
        return 0
    share = behind[last] / (behind[last] - behind[last + 1])
    return round(tokens[last] + share * (tokens[last + 1] - tokens[last]))


def _times(recorded: FirstSteps, name: str, own: AttentionConfig, methods: Path | None) -> StepTimes:
    """Step times at the recorded context."""
    assert recorded.shape is not None
    times = StepTimes(recorded.context_tokens, recorded.sequences, len(recorded.layers))
    latent, scale = recorded.shape.latent, recorded.shape.layers / len(recorded.layers)
    outputs = dict[str, NDArray[np.float32]]()
    ours = {} if own == NAMED["ours"] else {"ours": NAMED["ours"]}
    for method, attention in ({"dense": _DENSE, "sparf": AttentionConfig(), **ours} | {name: own}).items():
        try:
            attention = attention.for_model_dtype(recorded.bf16, latent)
            with _drives(recorded, attention, methods) as (driver, devices, batch):
                step, outputs[method] = _decode(recorded, driver, devices, batch)
        except ValueError as error:
            times.left_out[method] = str(error)
        else:
            times.step_times_ns[method], times.budgets[method] = step.ns * scale, _budget(attention)
            times.units_ns[method] = {
                unit: scale * sum(step.breakdown_ns[part] for part in parts) for unit, parts in UNITS.items()
            }
    try:
        if latent:
            raise ValueError("every drive stores all rows of latent attention")
        with _drives(recorded, AttentionConfig("dense", CompressionBudget(1), "opaque")) as (driver, devices, batch):
            ns = _read(recorded, driver, devices, batch)
    except ValueError as error:
        times.left_out[PLAIN_SSD] = str(error)
    else:
        times.step_times_ns[PLAIN_SSD], times.budgets[PLAIN_SSD] = ns * scale, _budget(_DENSE)
        times.output_errors[PLAIN_SSD] = 0.0
    if "dense" in outputs:
        times.output_errors |= {method: _error(output, outputs["dense"]) for method, output in outputs.items()}
    return times


def _error(output: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    norms = np.maximum(np.linalg.norm(exact, axis=-1), np.finfo(np.float32).tiny)
    return float((np.linalg.norm(output - exact, axis=-1) / norms).mean())


def _budget(attention: AttentionConfig) -> str:
    budget = attention.budget
    if isinstance(budget, CompressionBudget):
        return "all" if budget.c == 1 else f"1/{budget.c:g} ({budget.convention})"
    return f"k = {budget.params.k:,} tokens" if isinstance(budget, FixedBudget) else type(budget).__name__


@contextmanager
def _drives(
    recorded: FirstSteps, attention: AttentionConfig, methods: Path | None = None
) -> Iterator[tuple[Driver, Devices, Batch]]:
    """Create drives in memory and store the recorded prompt.

    Raises:
        ValueError: Not enough memory, or the layout does not support the method.
    """
    shape, layers = recorded.recorded_shape, list(recorded.layers.values())
    method_table = load_methods(methods)
    if attention.kv_layout.attended:  # otherwise it is only read
        check_method(attention, list(method_table))
    drives = DriveSetConfig(count=len(recorded.specs), spec=recorded.specs[0])
    check_drives(drives, attention, shape, recorded.sequences, recorded.max_tokens)
    with ExitStack() as undo:
        devices = [InProcessDrive(spec, methods=method_table) for spec in recorded.specs]
        for device in devices:
            undo.callback(device.close)
        driver = Driver(devices, shape, attention)
        undo.callback(driver.close)
        driver.terms = {number: layer.terms for number, layer in enumerate(layers) if layer.terms is not None}
        batch = driver.create(recorded.sequences, recorded.max_tokens)
        for number, layer in enumerate(layers):
            for rows, lengths, k, v in layer.prompt:
                driver.append(batch, rows, number, lengths, _loaded(k, v))
        driver.settle()
        yield driver, devices, batch


def _loaded(k: F16, v: F16) -> Callable[[], tuple[F16, F16]]:
    return lambda: (k, v)


def _idle_ns(driver: Driver, devices: Devices) -> int:
    """Next time at which the flash of all drives is idle, rounded up to the time model's grain, ns."""
    timing = [device.firmware.ftl.timing for device in devices]
    grain = max(flash.grain_ns for flash in timing)
    idle = max([driver.now_ns, *(flash.idle_ns() for flash in timing)])
    return -(-idle // grain) * grain


def _decode(
    recorded: FirstSteps, driver: Driver, devices: Devices, batch: Batch
) -> tuple[StepRecord, NDArray[np.float32]]:
    """The fastest of the first steps, and the outputs of all recorded steps (steps x layers x rows, q_heads, d)."""
    outputs, steps = [], list[StepRecord]()
    for number in range(max(TIMED, recorded.steps)):
        driver.now_ns = _idle_ns(driver, devices)
        with driver.step(1) as (whole,):
            for index, layer in enumerate(recorded.layers.values()):
                for rows, q, k, v in layer.steps[min(number, recorded.steps - 1)]:
                    output = driver.decode(batch, rows, whole, index, q, k, v)
                    if number < recorded.steps:
                        outputs.append(output)
        steps.append(driver.traffic.steps[-1])
    step = min(steps[:TIMED], key=lambda step: step.ns)
    joined = np.concatenate(outputs)
    if driver.bf16:  # BF16 is the upper half of an FP32 number
        return step, (joined.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return step, joined.astype(np.float32)


def _read(recorded: FirstSteps, driver: Driver, devices: Devices, batch: Batch) -> int:
    """Time until all keys and values have crossed the links, ns; all reads are submitted at the start."""
    start_ns, shape = _idle_ns(driver, devices), recorded.recorded_shape
    page_bytes = recorded.specs[0].geometry.page_bytes
    piece = GROUPS * LAYOUTS["opaque"].form(page_bytes, shape.head_dim, recorded.max_tokens).n
    submitted = [
        device.submit(KvRead(tuple(handles.tolist()), layer, first, piece), start_ns)
        for layer in range(shape.layers)
        for first in range(0, recorded.context_tokens, piece)
        for device, handles in zip(devices, batch.handles, strict=True)
    ]
    done = [future.result() for future in submitted]
    if refused := [completion.reason for completion in done if completion.status is not Status.SUCCESS]:
        raise ValueError(refused[0])
    return max(completion.finish_ns for completion in done) - start_ns
