"""Mutation test of the product: `./dev mutate`.

Each mutant of `mutants.yaml` is planted in a forked process, which then runs the tests of the changed module's partners
and, for the packages of a drive, a short crash sweep and a short simulation. A mutant is caught by the first of these
that fails. Kept tools (mutmut, cosmic-ray) start a Python for each mutant, and importing the product and loading its
compiled kernels takes longer than most tests do.

Verdicts are kept in build/mutants.json until the mutant, its module or its tests change, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from argparse import RawTextHelpFormatter
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.code_limits import partners
from tests.mutants.plant import PACKAGES, ROOT, Mutant, Stale, find, load, module_name, plant
from tests.mutants.propose import propose

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch, so before tests/conftest.py

MEMORY = ROOT / "build" / "mutants.json"
RESULTS = Path(__file__).with_name("results.json")
OF_A_DRIVE = ("ftl", "csd_link", "csd_firmware")
CUTS, SEEDS, STEPS = 200, 12, 40  # of the crash sweep and of the simulation
LIMIT_S = 600  # of a stage without a mutant, in which it has to pass
TIMES, MORE_S = 4, 60  # limit of a stage with a mutant: TIMES x its time without one, plus MORE_S seconds
MOST_PERCENT = 5  # of the mutants that may survive
CAUGHT, SURVIVED, HANGS = "caught", "survived", "hangs"
NOT_PLANTED = 9  # exit code
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
TESTS = ("tests", "not slow and not rtl and not model"), ("slow tests", "slow and not rtl and not model")


@dataclass(frozen=True, slots=True)
class Stage:
    """One check of a mutant."""

    name: str
    tests: tuple[str, ...] = ()
    marks: str = ""

    def run(self) -> bool:
        """Whether all is well; in a process of its own, since it has changed the product's code."""
        if self.name == "crash":
            crash = import_module("vcsd_eval.verify.crash").bench_crash(CUTS, 0)
            return not (crash["lost"] or crash["wrong"])
        if self.name == "simulate":
            simulate = import_module("vcsd_eval.verify.simulation.world").simulate
            return not any(simulate(seed, STEPS).failed for seed in range(SEEDS))
        with tempfile.TemporaryDirectory(prefix="vcsd-mutant-") as folder:
            # The product is loaded before pytest can rewrite the assertions of plugins that it uses too
            options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", IMPORTED, f"--basetemp={folder}/tests"]
            return pytest.main([*options, "-m", self.marks, *self.tests]) in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


def stages(mutant: Mutant) -> list[Stage]:
    """Checks of a mutant, quick ones first. Without files pytest would run everything."""
    path = find(mutant).relative_to(ROOT)
    named = Path("tests") / path.with_name(f"test_{path.name.lstrip('_')}")
    tests = {str(test) for test, module in _partners() if module == str(path)}
    tests |= {str(named)} if (ROOT / named).exists() else set()
    ordered = tuple(sorted(tests))
    wide = [Stage("crash"), Stage("simulate")] if path.parts[0] in OF_A_DRIVE else []
    quick, slow = ([Stage(name, ordered, marks)] if ordered else [] for name, marks in TESTS)
    return [*quick, *wide, *slow]


@functools.cache
def _partners() -> list[tuple[Path, str]]:
    return list(partners())


def attempt(mutant: Mutant | None, stage: Stage, limit_s: float) -> str:
    """Outcome of a stage in a forked process, with a mutant or without: CAUGHT, SURVIVED or HANGS."""
    log = MEMORY.with_name(f"mutant-{os.getpid()}.log")
    pid = os.fork()
    if pid == 0:
        _child(mutant, stage, log)
    until, done = time.monotonic() + limit_s, 0
    while not done and time.monotonic() < until:
        time.sleep(0.05)
        done, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # including processes that tests have started
    if not done:
        os.waitpid(pid, 0)
        return HANGS
    code = os.waitstatus_to_exitcode(status)
    if code == NOT_PLANTED:
        raise RuntimeError(f"{mutant}: {log.read_text().splitlines()[-1]}")
    return CAUGHT if code else SURVIVED


def _child(mutant: Mutant | None, stage: Stage, log: Path) -> NoReturn:
    code = NOT_PLANTED
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            if mutant:
                plant(mutant)
            code = 1
            code = int(not stage.run())
        except BaseException:  # of the mutant's making: it is caught
            traceback.print_exc(file=file)
    os._exit(code)


def judge(mutant: Mutant) -> dict[str, Any]:
    """Verdict on a mutant: which, the stage that caught it, and the seconds that it took."""
    began = time.monotonic()

    def said(verdict: str, stage: str = "") -> dict[str, Any]:
        return {"verdict": verdict, "by": stage, "seconds": round(time.monotonic() - began, 1)}

    for stage in stages(mutant):
        if (outcome := attempt(mutant, stage, TIMES * sound_s(stage) + MORE_S)) != SURVIVED:
            return said(outcome, stage.name)
    return said(SURVIVED)


@functools.cache
def sound_s(stage: Stage) -> float:
    """Seconds that a stage takes without a mutant; raises RuntimeError if it fails or takes too long."""
    began = time.monotonic()
    if attempt(None, stage, LIMIT_S) != SURVIVED:
        raise RuntimeError(f"without a mutant {stage.name} {' '.join(stage.tests)} fail or take over {LIMIT_S} s")
    return time.monotonic() - began


def state(mutant: Mutant) -> str:
    """Key of a verdict: changes with the mutant, its module and its tests."""
    files = [find(mutant), *(ROOT / test for stage in stages(mutant) for test in stage.tests)]
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(str(mutant).encode() + content).hexdigest()[:16]


def verdicts(mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Verdicts as they arrive, first those of an earlier run."""
    MEMORY.parent.mkdir(exist_ok=True)
    memory = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    keys = {mutant: state(mutant) for mutant in mutants}
    yield from ((mutant, memory[key]) for mutant, key in keys.items() if key in memory)
    for package in PACKAGES:  # loaded once, before the processes are forked
        for path in sorted((ROOT / package).rglob("*.py")):
            with suppress(ImportError):  # an optional package is not installed
                import_module(module_name(path))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(judge, mutant): mutant for mutant, key in keys.items() if key not in memory}
        try:
            for future in as_completed(futures):
                mutant = futures[future]
                memory[keys[mutant]] = future.result()
                MEMORY.write_text(json.dumps(memory, indent=1))
                yield mutant, memory[keys[mutant]]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def summary(mutants: Sequence[Mutant], found: dict[Mutant, dict[str, Any]]) -> dict[str, Any]:
    """Counts and rows; equivalent mutants are not counted."""
    counted = [mutant for mutant in mutants if not mutant.equivalent]
    survived = [mutant for mutant in counted if found[mutant]["verdict"] == SURVIVED]
    rows = [{"mutant": str(mutant), "equivalent": mutant.equivalent, **found[mutant]} for mutant in mutants]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "mutants": len(counted),
        "caught": len(counted) - len(survived),
        "survived": len(survived),
        "survived_percent": round(100 * len(survived) / max(len(counted), 1), 2),
        "equivalent": len(mutants) - len(counted),
        "caught_by": dict(Counter(found[mutant]["by"] for mutant in counted if found[mutant]["by"])),
        "rows": rows,
    }


def main() -> None:
    """The command; its exit code is 1 if more than MOST_PERCENT of the mutants survive."""
    parser = argparse.ArgumentParser(prog="./dev mutate", description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants of the list, drawn by --seed")
    parser.add_argument("--only", metavar="TEXT", help="mutants whose module, function or change has this text")
    parser.add_argument("--propose", type=int, metavar="N", help="instead of the list N new ones, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("-o", "--output", choices=("normal", "json"), default="normal")
    options = parser.parse_args()
    mutants = propose(options.propose, options.seed) if options.propose else load()
    if options.only:
        mutants = [mutant for mutant in mutants if options.only in str(mutant)]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    if not mutants:
        sys.exit("dev: no such mutants")
    console = Console(stderr=True)
    try:
        done = verdicts(mutants, options.jobs)
        found = dict(track(done, "mutants", len(mutants), console=console, disable=not console.is_terminal))
    except (Stale, RuntimeError) as error:
        sys.exit(f"dev: {error}")
    result = summary(mutants, found)
    if options.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if options.output == "json":
        print(json.dumps(result, indent=1))
    else:
        Console().print(_table(result))
    sys.exit(int(result["survived_percent"] > MOST_PERCENT))


def _table(result: dict[str, Any]) -> Table | str:
    """Survivors and equivalent mutants, under the counts."""
    title = f"{result['caught']} of {result['mutants']} mutants caught, {result['equivalent']} equivalent"
    shown = Table("mutant", "verdict", title=title)
    for row in result["rows"]:
        if row["verdict"] == SURVIVED:
            verdict = f"equivalent: {row['equivalent']}" if row["equivalent"] else SURVIVED
            shown.add_row(row["mutant"].replace("[", r"\["), verdict.replace("[", r"\["))
    return shown if shown.rows else title


if __name__ == "__main__":
    main()
