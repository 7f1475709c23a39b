"""`./dev tables [NAME ...]`: run the commands of the documentation's tables, and write their figures into the pages.

A table is a file NAME.yaml here: the page, the commands whose results it shows, and its text. A value is a Jinja2
expression over a command's JSON result. The text is a Jinja2 template, with it as `{{ run.value | f(".1f") }}` and
the days of all runs as `dates`. recorded.json keeps values with date, CPU and duration, so that a page can be written
again without running anything. In the page the table is between `<!-- table: NAME -->` and `<!-- /table -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined, TemplateError, is_undefined
from jinja2.sandbox import SandboxedEnvironment
from pydantic import BaseModel, ConfigDict, ValidationError

from vcsd_eval.doc_tables import cpu_name, with_table

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RECORDED = FOLDER / "recorded.json"
TEMPLATES = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


class TableError(ValueError):
    """A table, its command or its page is wrong; the text says what to do."""


class Run(BaseModel):
    """A command, and the values that a table shows of its JSON result.

    Attributes:
        command: Command line without `-o json`; `$VCSD_DATA` is the folder of public data sets.
        before: Shell command that makes the command's files.
        values: Jinja2 expressions by name; keys of the result are variables, and so is `result`, which has all keys.
        measured: Whether values depend on the machine; simulated times and counts do not.
    """

    model_config = ConfigDict(extra="forbid")
    command: str
    before: str = ""
    values: dict[str, str]
    measured: bool = False


class Table(BaseModel):
    """A table of one page."""

    model_config = ConfigDict(extra="forbid")
    page: str
    runs: dict[str, Run]
    text: str


class Recorded(BaseModel):
    """Result of a run: day, CPU, duration of the command in seconds, the expressions and their values."""

    model_config = ConfigDict(extra="forbid")
    command: str
    date: str
    cpu: str
    seconds: float
    expressions: dict[str, str]
    values: dict[str, Any]


def formatted(value: Any, spec: str) -> str:
    """A value in a format of `str.format`; an undefined one raises UndefinedError with its name."""
    return format(str(value) if is_undefined(value) else value, spec)


TEMPLATES.filters["f"] = formatted


def load(name: str) -> Table:
    """A table of this folder; raises TableError if it does not exist or is malformed."""
    path = FOLDER / f"{name}.yaml"
    if not path.exists():
        raise TableError(f"{name}: no such table; there are {', '.join(names())}")
    try:
        return Table.model_validate(yaml.safe_load(path.read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise TableError(f"{path.relative_to(ROOT)}: {' '.join(str(error).split())}") from None


def names() -> list[str]:
    """Names of all tables."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def evaluate(run: Run, result: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a run's result; raises TableError if the result lacks one."""
    values, variables = {}, {**result, "result": result}
    for name, expression in run.values.items():
        try:
            values[name] = TEMPLATES.compile_expression(expression, undefined_to_none=False)(**variables)
            json.dumps(values[name])
        except Exception as error:  # of any part of an expression
            raise TableError(f"{run.command}: {name} = {expression}: {error}") from None
    return values


def execute(run: Run) -> dict[str, Any]:
    """JSON result of a command of this checkout; raises TableError if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    if run.before and (code := subprocess.run(["bash", "-c", run.before], cwd=ROOT, check=False).returncode):
        raise TableError(f"{run.before}: exit code {code}")
    words = [os.path.expandvars(word) for word in shlex.split(run.command)]
    done = subprocess.run([*words, "-o", "json"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise TableError(f"{run.command}: exit code {done.returncode}")
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise TableError(f"{run.command}: its output is not JSON: {error}") from None
    return result


def record(run: Run, results: dict[str, tuple[dict[str, Any], float]]) -> Recorded:
    """Run a command, or take its result from `results`, which keeps result and seconds by command."""
    if run.command not in results:
        began_s = time.monotonic()
        results[run.command] = execute(run), time.monotonic() - began_s
    result, seconds = results[run.command]
    date = datetime.now(UTC).date().isoformat()
    values = evaluate(run, result)
    return Recorded(
        command=run.command, date=date, cpu=cpu_name(), seconds=round(seconds, 1), expressions=run.values, values=values
    )


def read_recorded() -> dict[str, dict[str, Recorded]]:
    """Recorded runs by table and name."""
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return {table: {name: Recorded.model_validate(run) for name, run in runs.items()} for table, runs in known.items()}


def write_recorded(known: Mapping[str, Mapping[str, Recorded]]) -> None:
    """Replace recorded.json."""
    plain = {table: {name: run.model_dump() for name, run in runs.items()} for table, runs in sorted(known.items())}
    RECORDED.write_text(json.dumps(plain, indent=1) + "\n")


def missing(table: Table, known: Mapping[str, Recorded]) -> Iterator[str]:
    """Runs of a table that are not recorded, or with another command or other expressions."""
    for name, run in table.runs.items():
        if name not in known or (known[name].command, known[name].expressions) != (run.command, run.values):
            yield name


def render(table: Table, known: Mapping[str, Recorded]) -> str:
    """Text of a table with its values; raises TableError if one is missing."""
    if lacking := list(missing(table, known)):
        raise TableError(f"not recorded as the table has them: {', '.join(lacking)}; run ./dev tables")
    runs = {name: {**run.values, "command": run.command} for name, run in known.items()}
    days = sorted({run.date for run in known.values()})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    try:
        return TEMPLATES.from_string(table.text).render(runs, dates=dates).strip("\n")
    except (TemplateError, ValueError, TypeError) as error:
        raise TableError(f"text of the table: {error}") from None


def update(chosen: Sequence[str], rerun: bool) -> None:
    """Run what is to be run, record each run as it ends, and write the pages."""
    known, results = read_recorded(), dict[str, tuple[dict[str, Any], float]]()
    for number, name in enumerate(chosen, 1):
        table = load(name)
        mine = known.setdefault(name, {})
        for run in [each for each in table.runs if rerun or each in set(missing(table, mine))]:
            print(f"tables: {number}/{len(chosen)} {name}: {table.runs[run].command}", file=sys.stderr, flush=True)
            mine[run] = record(table.runs[run], results)
            write_recorded(known)
        for old in set(mine) - set(table.runs):
            del mine[old]
        page = ROOT / table.page
        try:
            page.write_text(with_table(page.read_text(), name, render(table, mine)))
        except (OSError, ValueError) as error:
            raise TableError(f"{table.page}: {error}") from None
    write_recorded({name: runs for name, runs in known.items() if name in names()})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="./dev tables", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables; all without one")
    parser.add_argument("--missing", action="store_true", help="run only commands that are not recorded")
    parser.add_argument("--list", action="store_true", help="tables, their commands, and when they ran")
    options = parser.parse_args()
    try:
        if options.list:
            for name in options.names or names():
                for run in read_recorded().get(name, {}).values():
                    print(f"{name}\t{run.date}\t{run.seconds:g} s\t{run.command}")
        else:
            update(options.names or names(), not options.missing)
    except TableError as error:
        sys.exit(f"tables: {error}")


if __name__ == "__main__":
    main()
