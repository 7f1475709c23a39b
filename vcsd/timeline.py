"""Timeline of a decode step in simulated time: a trace for Perfetto, or a picture.

Tracks of the host: the step and its layers. Tracks of each drive: its commands, their critical path, the units of the
engine, dies and channels. Drives in other processes have
their commands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csd_firmware.trace import CommandTrace, DriveTrace, Segment
from csd_spec import Completion, DriveSpec
from csd_spec.optional import require
from csd_spec.units import ENGINE_UNITS
from ftl import FlashOperation
from host_driver.driver import Driver
from host_driver.first_steps import FirstSteps
from vcsd.progress import note
from vcsd.timeline_picture import SUFFIXES, draw
from vcsd.tracks import Slice, Tracks, count_slices, joined, write_trace


@dataclass(slots=True)
class LayerSpan:
    """A layer of a micro-batch: from its submission until the slowest drive has completed it."""

    micro_batch: int
    layer: int
    begin_ns: int
    done: list[Completion]


@dataclass(slots=True)
class StepTrace:
    """One decode step.

    Attributes:
        begin_ns, end_ns: Simulated time.
        layers: Layers in order of completion.
        commands: Commands of each drive in this process; empty for others.
    """

    begin_ns: int
    end_ns: int = 0
    layers: list[LayerSpan] = field(default_factory=list)
    commands: list[list[CommandTrace]] = field(default_factory=list)


class StepRecorder:
    """Records the most recent complete decode step of a driver until it is closed; also a context manager.

    Recording costs time for every page that is read, and changes no simulated time.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver, self._specs = driver, [device.spec for device in driver.devices]
        self._firmware = [getattr(device, "firmware", None) for device in driver.devices]
        self._traces = [DriveTrace() if firmware else None for firmware in self._firmware]
        self._set(self._traces)
        driver.observer = self
        self._current: StepTrace | None = None
        self.last: StepTrace | None = None

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording; the last step remains."""
        self._driver.observer = None
        self._set([None] * len(self._firmware))

    def _set(self, traces: Sequence[DriveTrace | None]) -> None:
        for firmware, trace in zip(self._firmware, traces, strict=True):
            if firmware:
                firmware.trace = trace

    def begin_step(self, now_ns: int) -> None:
        for trace in filter(None, self._traces):
            trace.clear()
        self._current = StepTrace(now_ns)

    def end_layer(self, number: int, layer: int, began_ns: int, done: list[Completion]) -> None:
        assert self._current is not None, "a layer outside of a step"
        self._current.layers.append(LayerSpan(number, layer, began_ns, done))

    def end_step(self, now_ns: int) -> None:
        assert self._current is not None, "a step ends that did not begin"
        self._current.end_ns = now_ns
        self._current.commands = [list(trace.commands) if trace else [] for trace in self._traces]
        self.last, self._current = self._current, None

    def write(self, path: Path) -> dict[str, Any]:
        """Write the last step to a file: a trace (.json) or a picture (.svg, .png, .pdf).

        Returns:
            Its simulated time (`step_ns`), its number of slices, and how many of them were merged.

        Raises:
            ValueError: No step was recorded, or see `check_timeline_path`.
            OSError: The file cannot be written.
        """
        check_timeline_path(path)
        if self.last is None:
            raise ValueError(f"{path}: no decode step was run: ask for at least 2 new tokens")
        processes, step = tracks_of(self.last, self._specs), {"step_ns": self.last.end_ns - self.last.begin_ns}
        if path.suffix == ".json":
            return write_trace(path, processes, ("channel", "engine"), step)
        draw(processes, path)
        return step | {"slices": count_slices(processes), "merged_slices": 0}


def check_timeline_path(path: Path) -> None:
    """Raise ValueError if the suffix is neither .json nor that of a picture, if the folder is missing, or if nothing
    can draw a picture.
    """
    if path.suffix not in (".json", *SUFFIXES):
        raise ValueError(f"{path}: must end in .json, {', '.join(SUFFIXES)}")
    if path.suffix in SUFFIXES:
        require(f"a picture ({path})", "plot", "matplotlib")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}: create it")


def tracks_of(step: StepTrace, specs: Sequence[DriveSpec]) -> dict[str, Tracks]:
    """Tracks of the host and of each drive, by process."""
    zero = step.begin_ns
    host: Tracks = {"step": [Slice("decode step", 0, step.end_ns - zero)]}
    for span in step.layers:
        end_ns = max(completion.finish_ns for completion in span.done)
        track = host.setdefault(f"micro-batch {span.micro_batch}", [])
        details = {"slowest_drive": max(range(len(span.done)), key=lambda drive: span.done[drive].finish_ns)}
        track.append(Slice(f"layer {span.layer}", span.begin_ns - zero, end_ns - zero, details=details))
    processes = {"host": host}
    for drive, spec in enumerate(specs):
        tracks = _drive_tracks(step.commands[drive], spec, zero) if step.commands[drive] else _outside(step, drive)
        processes[f"drive {drive}"] = tracks
    return processes


def _outside(step: StepTrace, drive: int) -> Tracks:
    """Tracks of a drive in another process: its completions alone."""
    spans = [
        _command(f"Attend, layer {span.layer}", span.done[drive], step.begin_ns)
        for span in step.layers
        if drive < len(span.done)
    ]
    return {"commands": spans}


def _command(name: str, done: Completion, zero: int) -> Slice:
    flash = done.flash
    details = {"breakdown_ns": done.breakdown_ns, "link_bytes": done.link_bytes}
    return Slice(name, done.submit_ns - zero, done.finish_ns - zero, flash.pages_read, flash.fetched_bytes, details)


def _drive_tracks(commands: Sequence[CommandTrace], spec: DriveSpec, zero: int) -> Tracks:
    tracks: Tracks = {"commands": [], "critical path": []}
    units, flash = list[Segment](), list[FlashOperation]()
    for command in commands:
        if command.completion:
            name = command.name if command.layer < 0 else f"{command.name}, layer {command.layer}"
            tracks["commands"].append(_command(name, command.completion, zero))
        tracks["critical path"] += [Slice(unit, begin - zero, end - zero) for unit, begin, end in command.path]
        units += command.units or [part for part in command.path if part.unit in ENGINE_UNITS]
        flash += command.flash
    return tracks | _engine_tracks(units, zero) | _flash_tracks(flash, spec, zero)


def _engine_tracks(units: Iterable[Segment], zero: int) -> Tracks:
    """A track for each unit that works at the same time as others of its pool."""
    tracks: Tracks = {}
    ends: dict[str, list[int]] = {"argtopk": [], "kernel": []}
    for unit, begin, end in sorted(units, key=lambda segment: (segment.begin_ns, segment.end_ns)):
        pool = "argtopk" if unit == "argtopk" else "kernel"
        free = next((number for number, last in enumerate(ends[pool]) if last <= begin), len(ends[pool]))
        ends[pool][free : free + 1] = [end]
        tracks.setdefault(f"engine, {pool} {free}", []).append(Slice(unit, begin - zero, end - zero))
    return dict(sorted(tracks.items()))


def _flash_tracks(flash: Iterable[FlashOperation], spec: DriveSpec, zero: int) -> Tracks:
    """Tracks of dies, which sense, program and erase, and of channels, which move bytes."""
    geometry, read_ns = spec.geometry, spec.timing.read_ns
    bytes_per_s = spec.channel_timing.channel_bytes_per_s
    dies: Tracks = {}
    channels: Tracks = {}
    for kind, ppn, nbytes, begin, end in flash:
        lane = ppn % geometry.lanes
        channel = lane % geometry.channels
        until = begin + read_ns if kind == "read" else end
        name = "sense" if kind == "read" else kind
        die = f"channel {channel:02}, lane {lane // geometry.channels:02}"
        dies.setdefault(die, []).append(Slice(name, begin - zero, until - zero, 1, nbytes))
        if kind == "read":
            took_ns = -(-nbytes * 1_000_000_000 // bytes_per_s)
            channels.setdefault(f"channel {channel:02}", []).append(
                Slice("transfer", max(until, end - took_ns) - zero, end - zero, 1, nbytes)
            )
    return {name: list(joined(track)) for name, track in sorted((channels | dies).items())}


@dataclass(slots=True)
class StepRecords:
    """What a run records of its decode steps.

    Attributes:
        first: The first ones, to time other methods; None: not recorded.
        timeline: File for the last one; None: not recorded.
    """

    first: FirstSteps | None
    timeline: Path | None
    steps: StepRecorder | None = None

    def watch(self, driver: Driver) -> None:
        """Record steps of a driver."""
        driver.recorder = self.first
        if self.timeline:
            self.steps = StepRecorder(driver)

    def write(self) -> dict[str, Any]:
        """Write the timeline, if any; returns its figures for JSON output."""
        if not self.timeline or not self.steps:
            return {}
        told = self.steps.write(self.timeline)
        hint = "; open it at https://ui.perfetto.dev" if self.timeline.suffix == ".json" else ""
        note(f"{self.timeline}: {told['slices']:,} slices{hint}")
        return {"timeline": {"file": str(self.timeline), **told}}
