"""Trace of commands in simulated time: when each resource of the drive was busy, for `vcsd.timeline`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from csd_spec import Command, Completion
from ftl import FlashOperation


class Segment(NamedTuple):
    """A part of a command's critical path, or the time of an engine unit.

    Attributes:
        unit: Unit, see `csd_spec.units`.
        begin_ns, end_ns: Simulated time.
    """

    unit: str
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class CommandTrace:
    """Busy times of one command.

    Attributes:
        name: Name of the command.
        layer: Layer of the model; -1 if the command has none.
        path: Critical path, without gaps from submission to completion.
        flash: Page reads, programs and erases.
        units: Work of the engine by stream; empty in the serial schedule, since its path has it.
        completion: The completion; None until the command completes.
    """

    name: str
    layer: int
    path: list[Segment] = field(default_factory=list)
    flash: list[FlashOperation] = field(default_factory=list)
    units: list[Segment] = field(default_factory=list)
    completion: Completion | None = None


class DriveTrace:
    """Traces of a drive's commands since `clear`."""

    def __init__(self) -> None:
        self.commands: list[CommandTrace] = []

    def clear(self) -> None:
        """Forget all commands."""
        self.commands.clear()

    @contextmanager
    def command(self, command: Command) -> Iterator[CommandTrace]:
        """Trace one command; it is kept if it completes."""
        trace = CommandTrace(type(command).__name__, getattr(command, "layer", -1))
        yield trace
        self.commands.append(trace)
