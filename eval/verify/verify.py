"""`vcsd verify`: attempts to break the program; each counts what broke, and that must be 0.

The simulation draws from all faults. The other checks go through every moment of one fault, or need what a simulation
has not: real processes and sockets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, Literal

import typer

from vcsd.options import MAX_SEED, OptionError
from vcsd.progress import Tick, progress
from vcsd.tables import flat_table, table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import MediumOption

NOTES = 20  # most notes to print; -o json has all


class InjectedBug(StrEnum):
    """A bug to inject into the simulation."""

    NONE = "none"
    LOCK = "lock"
    CHAIN = "chain"
    GENERATION = "generation"
    OWNER = "owner"
    COMPLETION = "completion"
    NAMES = "names"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Attempts:
    """Extent of a check."""

    count: Annotated[int | None, typer.Option(min=1, max=10**9, help="attempts (default: by check)")] = None
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed; the simulation's first one")] = 0
    workers: Annotated[int, typer.Option(min=1, max=256, help="processes, of checks that use several")] = 2
    medium: MediumOption = "memory"
    inject_bug: Annotated[
        InjectedBug, typer.Option(help="of the simulation: a bug; ends at the first seed that finds it")
    ] = InjectedBug.NONE


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        what: What it does, for the help text.
        place: `module:function` below `vcsd_eval.verify`, with the arguments count, seed, tick and those of `options`.
        count: Default number of attempts.
        zeros: Counts of its result that must be 0.
        options: Fields of `Attempts` that it uses besides count and seed.
        ticks: Steps of its progress, for a number of attempts.
    """

    what: str
    place: str
    count: int
    zeros: tuple[str, ...]
    options: tuple[str, ...] = ()
    ticks: Callable[[int], float] = float

    def run(self, count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
        """Import and run it."""
        module, _, function = self.place.partition(":")
        check = getattr(import_module(f"vcsd_eval.verify.{module}"), function)
        result: dict[str, Any] = check(
            count, seed=attempts.seed, tick=tick, **{name: getattr(attempts, name) for name in self.options}
        )
        return result


CheckName = Literal[
    "simulation",
    "power-loss",
    "exceptions",
    "bit-flips",
    "commands",
    "pdus",
    "kills",
    "lost-drives",
    "connections",
    "serving",
]
_BROKEN = ("lost", "wrong")
_UNSAFE = ("crashes", "hangs", "leaks", "state_changes")
CHECKS: dict[CheckName, Check] = {
    "simulation": Check(
        "hosts, windows, firmware, FTL and disks on a virtual clock, every fault that a seed draws",
        "simulation.simulate:bench_simulate",
        100,
        (*_BROKEN, "hangs"),
        ("workers", "inject_bug"),
    ),
    "power-loss": Check(
        "at every moment of a trace of all verbs",
        "crash:bench_crash",
        10_000,
        _BROKEN,
        ("medium",),
        lambda n: 1.15 * n,
    ),
    "exceptions": Check(
        "at lines and allocations inside every verb", "exceptions:bench_exceptions", 20_500, _BROKEN, ("workers",)
    ),
    "bit-flips": Check("in all files of a drive", "flips:bench_flips", 10_000, ("silent",), ("workers",)),
    "commands": Check(
        "mutated ones and windows, beside another tenant",
        "fuzz:bench_fuzz",
        100_000,
        (*_UNSAFE, "values_wrong"),
        ("medium",),
        lambda n: n / 10_000,
    ),
    "pdus": Check(
        "mutated ones of NVMe/TCP, beside another host",
        "nvme_fuzz:bench_nvme_fuzz",
        100_000,
        _UNSAFE,
        ticks=lambda n: n / 5_000,
    ),
    "kills": Check("of drives in a decode, which restart", "kills:bench_kills", 100, _BROKEN, ("medium",)),
    "lost-drives": Check(
        "for good, with redundancy",
        "lost_drives:bench_lost_drives",
        25,
        (*_BROKEN, "not_redundant", "not_refused"),
        ticks=lambda n: 2 * n + 1,
    ),
    "connections": Check(
        "cut, delayed and damaged over NVMe/TCP",
        "nvme_cuts:bench_nvme_cuts",
        25,
        (*_BROKEN, "twice", "refusals_missed"),
    ),
    "serving": Check(
        "requests under every policy, beside each alone",
        "serving:bench_serving",
        24,
        ("wrong", "over_limit", "left_bytes", "failed"),
        ticks=lambda n: 27 * n,
    ),
}
CHECK_HELP = "; ".join(f"{name}: {check.what}" for name, check in CHECKS.items())


def verify(check: Annotated[CheckName, typer.Argument(help=CHECK_HELP)], attempts: Attempts) -> Outcome:
    """Try to break the program; the exit code is 1 if something is lost, wrong, hangs or goes unnoticed."""
    chosen = CHECKS[check]
    for option, default in (("workers", 2), ("medium", "memory"), ("inject_bug", InjectedBug.NONE)):
        if option not in chosen.options and getattr(attempts, option) != default:
            raise OptionError(f"--{option.replace('_', '-')} has no effect on {check}: remove it")
    count = attempts.count or chosen.count
    with progress(check, math.ceil(chosen.ticks(count))) as tick:
        result = chosen.run(count, attempts, tick)
    broke = any(result[key] for key in chosen.zeros)
    failed = broke if attempts.inject_bug is InjectedBug.NONE else not broke
    return Outcome(result, _tables(check, result), _notes(result), failed=failed)


def _tables(title: str, result: dict[str, Any]) -> list[Any]:
    """A table of the figures, and one of each part of the result that has rows."""
    shown = [flat_table(title, {name: value for name, value in result.items() if not isinstance(value, (dict, list))})]
    for name, part in result.items():
        if isinstance(part, dict) and all(isinstance(row, dict) for row in part.values()):
            part = [{"": key} | row for key, row in part.items()]
        if isinstance(part, dict):
            shown.append(flat_table(name, part))
        elif isinstance(part, list) and part and isinstance(part[0], dict):
            columns = [key for key, value in part[0].items() if not isinstance(value, dict)]
            shown.append(table(name, columns, [[_cell(row[key]) for key in columns] for row in part]))
    return shown


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _notes(result: dict[str, Any]) -> list[str]:
    """What broke, in words."""
    return [line for part in result.values() if isinstance(part, list) for line in part if isinstance(line, str)][
        :NOTES
    ]
