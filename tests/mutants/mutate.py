"""Mutation test of the product: `./dev mutate`.

Each mutant of `mutants.yaml`, or of a random draw over all product modules, is planted in a forked process, which then
runs the tests of the changed module's partners, the type checker, the linter's rule about blind exceptions, for the
packages of a drive a short crash sweep and a short simulation, and other tests that reach the changed function
(`reach.py`). A mutant is caught by the first of these that fails. Kept tools (mutmut, cosmic-ray) start a Python for
each mutant, and importing the product and loading its compiled kernels takes longer than most tests do.

Verdicts are kept in build/mutants.json until the mutant, its module or its tests change, so an interrupted run goes on.
Mutants that no test can catch are in `mutants.yaml` or `equivalent.yaml` with the reason, and are not counted.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import RawTextHelpFormatter
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.code_limits import partners
from tests.mutants import reach
from tests.mutants.operators import draw
from tests.mutants.plant import PACKAGES, ROOT, Mutant, Stale, find, load, module_name, mutated_text, plant

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch, so before tests/conftest.py

MEMORY = ROOT / "build" / "mutants.json"
RESULTS = Path(__file__).with_name("results.json")
OF_A_DRIVE = ("ftl", "csd_link", "csd_firmware")
CUTS, SEEDS, STEPS = 200, 12, 40  # of the crash sweep and of the simulation
REACHING_S = 60  # recorded seconds of further tests that reach the changed function
MORE_S, TIMES = 120, 10  # limit of a stage: MORE_S, and TIMES the seconds that tests/durations.json has for its tests
MOST_PERCENT = 5  # of the list's mutants that may survive
MOST_RANDOM_PERCENT, MOST_CORE_PERCENT = 12, 6  # of random mutants: of all, and of those in CORE
CORE = ("ftl.", "csd_link.nvmeof.", "kv_cache.block_table:", "host_driver.prefixes.", "csd_link.replication:")
CAUGHT, SURVIVED, HANGS = "caught", "survived", "hangs"
IMPOSSIBLE = "cannot be planted"  # its module needs a package that is not installed, or Python refuses the code
UNSOUND = "its test fails without it, too"
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")  # of random draws; mutant: reason
ALL = "all tests"  # that reach the function, outside of its partners' files
MARKS = {
    "tests": "not slow and not rtl and not model",
    "slow tests": "slow and not rtl and not model",
    "tests with models": "model and not rtl",
    ALL: "not long",
}


class FirstFailure:
    """Pytest plugin: the first test, or file, that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note(report)

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


@dataclass(frozen=True, slots=True)
class Stage:
    """One check of a mutant: tests, a crash sweep or a simulation."""

    name: str
    tests: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float:
        """Seconds after which it hangs."""
        return MORE_S + TIMES * sum(seconds for test, seconds in _durations().items() if test.startswith(self.tests))

    def run(self, mutant: Mutant | None = None) -> str:
        """Return what fails, or an empty text; in a process of its own, since it has changed the product's code."""
        if self.name == "types":
            return _type_error(mutant)
        if self.name == "lint":
            return _lint_error(mutant) if mutant else ""
        if self.name == "crash":
            crash = import_module("vcsd_eval.verify.crash").bench_crash(CUTS, 0)
            return "crash" if crash["lost"] or crash["wrong"] else ""
        if self.name == "simulate":
            simulate = import_module("vcsd_eval.verify.simulation.world").simulate
            return "simulate" if any(simulate(seed, STEPS).failed for seed in range(SEEDS)) else ""
        with tempfile.TemporaryDirectory(prefix="vcsd-mutant-") as folder:
            # The product is loaded before pytest can rewrite the assertions of plugins that it uses too
            options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", IMPORTED, f"--basetemp={folder}/tests"]
            failure = FirstFailure()
            code = pytest.main([*options, "-m", MARKS[self.name], *self.tests], [failure])
        return "" if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else failure.name or f"pytest ends with {code}"


def _type_error(mutant: Mutant | None) -> str:
    """What mypy says of the module with the mutant: ./dev test runs mypy."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", f"--cache-dir={MEMORY.with_name('mypy')}"]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as changed:
        if mutant:
            changed.write(mutated_text(mutant))
            changed.flush()
            path = str(find(mutant).relative_to(ROOT))
            command += ["--shadow-file", path, changed.name, path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (done.stdout + done.stderr).partition("\n")[0] if done.returncode else ""


def _lint_error(mutant: Mutant) -> str:
    """What ruff says of exceptions that the mutant would hide; not of its style, which is bad in most mutants."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--quiet",
        "--select",
        "BLE",
        "--stdin-filename",
        find(mutant),
        "-",
    ]
    done = subprocess.run(command, cwd=ROOT, input=mutated_text(mutant), capture_output=True, text=True)
    return (done.stdout + done.stderr).partition("\n")[0] if done.returncode else ""


def stages(mutant: Mutant) -> list[Stage]:
    """Checks of a mutant, quick ones first. Without files pytest would run everything."""
    path = find(mutant).relative_to(ROOT)
    named = Path("tests") / path.with_name(f"test_{path.name.lstrip('_')}")
    tests = {str(test) for test, module in _partners() if module == str(path)}
    tests |= {str(named)} if (ROOT / named).exists() else set()
    ordered = tuple(sorted(tests))
    wide = [Stage("crash"), Stage("simulate")] if path.parts[0] in OF_A_DRIVE else []
    quick, *later = ([Stage(name, ordered)] if ordered else [] for name in MARKS if name != ALL)
    reaching = _reaching_tests(mutant.at, tests)
    last = [Stage(ALL, reaching)] if reaching else []
    return [*quick, Stage("types"), Stage("lint"), *wide, *chain.from_iterable(later), *last]


def _reaching_tests(function: str, tried: set[str]) -> tuple[str, ...]:
    """Tests that reach a function, but for those tried: as many as REACHING_S allows, and at least one."""
    tests = [test for test in reach.tests_that_reach(function) if test.partition("::")[0] not in tried]
    sums = accumulate(_durations().get(test, 0.0) for test in tests)
    return tuple(test for test, total in zip(tests, sums, strict=True) if total <= REACHING_S or test == tests[0])


@functools.cache
def _partners() -> list[tuple[Path, str]]:
    return list(partners())


@functools.cache
def _durations() -> dict[str, float]:
    durations: dict[str, float] = json.loads((ROOT / "tests/durations.json").read_text())
    return durations


def attempt(mutant: Mutant | None, stage: Stage, limit_s: float) -> tuple[str, str]:
    """Outcome of a stage in a forked process, with a mutant or without, and what failed.

    The outcome is CAUGHT, SURVIVED, HANGS or IMPOSSIBLE.
    """
    log = MEMORY.with_name(f"mutant-{os.getpid()}.log")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(mutant, stage, log, writer)
    os.close(writer)
    poll = select.poll()  # unlike select(), of any number of open files
    poll.register(reader, select.POLLIN)
    with os.fdopen(reader) as pipe:
        said = pipe.readline() if poll.poll(1000 * limit_s) else HANGS
    for kill in (os.killpg, os.kill):  # including processes that tests have started; it may have no group yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    outcome, _, what = said.strip().partition(": ")
    return (outcome, what) if said else (CAUGHT, "the process died")


def _child(mutant: Mutant | None, stage: Stage, log: Path, writer: int) -> NoReturn:
    try:
        os.setsid()
        os.write(writer, f"{' '.join(_outcome(mutant, stage, log).split())}\n".encode())
    finally:
        os._exit(0)  # whatever happens: it must not go on as the process that it was forked from


def _outcome(mutant: Mutant | None, stage: Stage, log: Path) -> str:
    """What a stage says of a mutant: its outcome, and what failed."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        outcome = IMPOSSIBLE
        try:
            if mutant:
                plant(mutant)
            outcome = f"{CAUGHT}: it raises"
            failing = stage.run(mutant)
            outcome = f"{CAUGHT}: {failing}" if failing else SURVIVED
        except BaseException as error:  # noqa: BLE001 - of the mutant's making: it is caught
            traceback.print_exc(file=file)
            outcome += f": {error}" if outcome == IMPOSSIBLE else ""
    return outcome


def judge(mutant: Mutant) -> dict[str, Any]:
    """Verdict on a mutant, the stage and the test that caught it, and the seconds that it took."""
    began, outcome, by, what = time.monotonic(), SURVIVED, "", ""
    for stage in stages(mutant):
        outcome, what = attempt(mutant, stage, stage.limit_s)
        if outcome != SURVIVED:
            by = stage.name
            if outcome != IMPOSSIBLE and not is_sound(stage, what):
                outcome = UNSOUND
            break
    return {"verdict": outcome, "by": by, "what": what, "seconds": round(time.monotonic() - began, 1)}


@functools.cache
def is_sound(stage: Stage, what: str) -> bool:
    """Whether the test that failed with a mutant, or else the whole stage, passes without one."""
    of_test = stage.tests and ("::" in what or what.endswith(".py"))
    alone = Stage(stage.name, (what,)) if of_test else stage
    return attempt(None, alone, alone.limit_s)[0] == SURVIVED


def state(mutant: Mutant) -> str:
    """Key of a verdict: changes with the mutant, its module and its tests."""
    files = [find(mutant), *(ROOT / test.partition("::")[0] for stage in stages(mutant) for test in stage.tests)]
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
    """Counts and rows; equivalent mutants, and those that cannot be planted, are not counted."""
    rows = [{"mutant": str(mutant), "equivalent": mutant.equivalent, **found[mutant]} for mutant in mutants]
    counted = [row for row in rows if not row["equivalent"] and row["verdict"] in (CAUGHT, SURVIVED, HANGS)]
    core = [row for row in counted if row["mutant"].startswith(CORE)]
    survived = sum(row["verdict"] == SURVIVED for row in counted)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "mutants": len(counted),
        "caught": len(counted) - survived,
        "survived": survived,
        "survived_percent": _survived_percent(counted),
        "core": len(core),
        "core_survived_percent": _survived_percent(core),
        "equivalent": sum(bool(row["equivalent"]) for row in rows),
        "impossible": sum(row["verdict"] == IMPOSSIBLE for row in rows),
        "unsound": sum(row["verdict"] == UNSOUND for row in rows),
        "caught_by": dict(Counter(row["by"] for row in counted if row["by"])),
        "rows": rows,
    }


def _survived_percent(rows: Sequence[dict[str, Any]]) -> float:
    return round(100 * sum(row["verdict"] == SURVIVED for row in rows) / max(len(rows), 1), 2)


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """Mutants of the list or of a random draw, as the options say."""
    if options.random is None:
        mutants = load()
    else:
        reasons: dict[str, str] = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8"))
        drawn = draw(options.random, options.seed)
        mutants = [replace(mutant, equivalent=reasons.get(str(mutant), "")) for mutant in drawn]
    if options.only:
        mutants = [mutant for mutant in mutants if options.only in str(mutant)]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    return mutants


def record(found: dict[Mutant, dict[str, Any]]) -> None:
    """Write the verdicts on mutants of the list, beside those of earlier runs on others."""
    rows = {row["mutant"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    rows |= {str(mutant): verdict for mutant, verdict in found.items()}
    judged = {mutant: rows[str(mutant)] for mutant in load() if str(mutant) in rows}
    RESULTS.write_text(json.dumps(summary(list(judged), judged), indent=1) + "\n")


def main() -> None:
    """The command; its exit code is 1 if more mutants survive than may."""
    parser = argparse.ArgumentParser(prog="./dev mutate", description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants of the list, drawn by --seed")
    parser.add_argument("--only", metavar="TEXT", help="mutants whose module, function or change has this text")
    parser.add_argument("--random", type=int, metavar="N", help="instead of the list N of all modules, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--record-reach", action="store_true", help="run all tests, and write which reach what")
    parser.add_argument("-o", "--output", choices=("normal", "json"), default="normal")
    options = parser.parse_args()
    if options.record_reach:
        sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-q", "-n", str(options.jobs), "-p", reach.__name__]))
    mutants = chosen(options)
    if not mutants:
        sys.exit("dev: no such mutants")
    console = Console(stderr=True)
    try:
        done = verdicts(mutants, options.jobs)
        outcome = dict(track(_told(done, len(mutants), console), "mutants", len(mutants), console=console))
    except (Stale, RuntimeError) as error:
        sys.exit(f"dev: {error}")
    result = summary(mutants, outcome)
    if options.write:
        record(outcome)
    if options.output == "json":
        print(json.dumps(result, indent=1))
    else:
        Console().print(_table(result))
    most = MOST_PERCENT if options.random is None else MOST_RANDOM_PERCENT
    too_many = result["survived_percent"] > most
    too_many |= options.random is not None and result["core_survived_percent"] > MOST_CORE_PERCENT
    not_judged = result["unsound"] or (options.random is None and result["impossible"])
    sys.exit(int(too_many or not_judged > 0))


def _told(
    done: Iterator[tuple[Mutant, dict[str, Any]]], count: int, console: Console
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Print each verdict as it arrives."""
    for number, (mutant, verdict) in enumerate(done, 1):
        said = f"{number} of {count}, {verdict['seconds']:.0f} s: {verdict['verdict']}: {mutant}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        yield mutant, verdict


def _table(result: dict[str, Any]) -> Table | str:
    """Survivors, equivalent and unusable mutants, under the counts."""
    title = f"{result['caught']} of {result['mutants']} mutants caught, {result['equivalent']} equivalent"
    title += f"; of {result['core']} in the core {result['core_survived_percent']} % survive"
    shown = Table("mutant", "verdict", "", title=title)
    for row in result["rows"]:
        if row["verdict"] not in (CAUGHT, HANGS):
            why = f"equivalent: {row['equivalent']}" if row["equivalent"] else row.get("what", "")
            shown.add_row(*(text.replace("[", r"\[") for text in (row["mutant"], row["verdict"], why)))
    return shown if shown.rows else title


if __name__ == "__main__":
    main()
