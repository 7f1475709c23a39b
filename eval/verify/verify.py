"""`vcsd verify`: attempts to break the program; each counts what broke, and that must be 0.

The simulation draws from all faults. The other checks go through every moment of one fault, or need what a simulation
has not: real processes and sockets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import typer

from vcsd.options import MAX_SEED, OptionError
from vcsd.progress import Tick, progress
from vcsd.tables import flat_table, table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import MediumOption

SIMULATED_MINUTES = 8.0  # after which the simulation starts no seed, unless --count says how many there are
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
    """A check: its number of attempts, how to run them, and the counts of its result that must be 0.

    Attributes:
        what: What it does, for the help text.
        options: Fields of `Attempts` that it uses besides count and seed.
        ticks: Steps of its progress, for a number of attempts.
    """

    what: str
    count: int
    run: Callable[[int, Attempts, Tick], dict[str, Any]]
    zeros: tuple[str, ...]
    options: tuple[str, ...] = ()
    ticks: Callable[[int], float] = float


def _simulation(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.simulation.simulate import bench_simulate

    seeds = range(attempts.seed, attempts.seed + count)
    minutes = math.inf if attempts.count else SIMULATED_MINUTES
    return bench_simulate(seeds, minutes, attempts.inject_bug.value, attempts.workers, tick)


def _power_loss(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.crash import bench_crash

    return bench_crash(count, attempts.seed, tick, attempts.medium)


def _exceptions(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.exceptions import bench_exceptions

    return bench_exceptions(count, attempts.seed, attempts.workers, tick)


def _bit_flips(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.flips import bench_flips

    return bench_flips(count, attempts.seed, attempts.workers, tick)


def _commands(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.fuzz import bench_fuzz

    return bench_fuzz(count, attempts.seed, tick, attempts.medium)


def _pdus(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.nvme_fuzz import bench_nvme_fuzz

    return bench_nvme_fuzz(count, attempts.seed, tick)


def _kills(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.faults import KillLoad, bench_faults

    return bench_faults(KillLoad(kills=count, seed=attempts.seed, medium=attempts.medium), tick)


def _lost_drives(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.lost_drives import LossOptions, bench_lost_drives

    return bench_lost_drives(LossOptions(kills=count, seed=attempts.seed), tick)


def _connections(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.nvme_cuts import bench_nvme_cuts

    return bench_nvme_cuts(count, attempts.seed, tick)


def _serving(count: int, attempts: Attempts, tick: Tick) -> dict[str, Any]:
    from vcsd_eval.verify.serving import ServingLoad, bench_serving

    return bench_serving(ServingLoad(requests=count, seed=attempts.seed), tick)


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
        1000,
        _simulation,
        (*_BROKEN, "hangs"),
        ("workers", "inject_bug"),
    ),
    "power-loss": Check(
        "at every moment of a trace of all verbs", 10_000, _power_loss, _BROKEN, ("medium",), lambda n: 1.15 * n
    ),
    "exceptions": Check("at lines and allocations inside every verb", 20_500, _exceptions, _BROKEN, ("workers",)),
    "bit-flips": Check("in all files of a drive", 10_000, _bit_flips, ("silent",), ("workers",)),
    "commands": Check(
        "mutated ones and windows, beside another tenant",
        100_000,
        _commands,
        (*_UNSAFE, "values_wrong"),
        ("medium",),
        lambda n: n / 10_000,
    ),
    "pdus": Check("mutated ones of NVMe/TCP, beside another host", 100_000, _pdus, _UNSAFE, ticks=lambda n: n / 5_000),
    "kills": Check("of drives in a decode, which restart", 100, _kills, _BROKEN, ("medium",)),
    "lost-drives": Check(
        "for good, with redundancy",
        25,
        _lost_drives,
        (*_BROKEN, "not_redundant", "not_refused"),
        ticks=lambda n: 2 * n + 1,
    ),
    "connections": Check(
        "cut, delayed and damaged over NVMe/TCP", 25, _connections, (*_BROKEN, "twice", "refusals_missed")
    ),
    "serving": Check(
        "requests under every policy, beside each alone",
        24,
        _serving,
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
