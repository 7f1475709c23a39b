"""`./dev tables [NAME ...]`: run the commands of the documentation's tables, and write their figures into the pages.

A file NAME.yaml here has tables of one page: the commands whose results they show, and their texts. A value is a
Jinja2 expression over a command's JSON result. A text is a Jinja2 template with a run's value as
`{{ run.value | f(".1f") }}`, its `command`, `cpu`, `date` and `seconds`, and the days of all runs as `dates`. Filters
of lists of rows are `columns("name", "error")`, `where(name="ours")` and `only(name="ours", budget=0.5)`. NAME.json
keeps the values of the last runs, so that a page can be written again without running anything. In the page, a table
is between `<!-- table: ITS NAME -->` and `<!-- /table -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
TEMPLATES = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


class TableError(ValueError):
    """A table, its command or its page is wrong; the text says what to do."""


class Run(BaseModel):
    """A command, and the values that tables show of its JSON result.

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


class Tables(BaseModel):
    """Tables of one page: texts by name, and the runs with their values.

    Attributes:
        page: The page.
        uses: Other files of this folder, whose runs the texts have as `other["FILE"].RUN`.
        runs: Commands by name.
        tables: Texts by the name of the table.
    """

    model_config = ConfigDict(extra="forbid")
    page: str
    uses: tuple[str, ...] = ()
    runs: dict[str, Run] = {}
    tables: dict[str, str]


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


def columns(rows: Sequence[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Rows with some of their values only; raises KeyError if one lacks a value."""
    return [{name: row[name] for name in names} for row in rows]


def where(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    """Rows that have the wanted values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def only(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any]:
    """The one row that has the wanted values; raises ValueError if no row or several have them."""
    found = where(rows, **wanted)
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {wanted}: must be one")
    return found[0]


TEMPLATES.filters |= {"f": formatted, "columns": columns, "where": where, "only": only}


def load(name: str) -> Tables:
    """Tables of NAME.yaml; raises TableError if it does not exist or is malformed."""
    path = FOLDER / f"{name}.yaml"
    if not path.exists():
        raise TableError(f"{name}: no such file of tables; there are {', '.join(names())}")
    try:
        return Tables.model_validate(yaml.safe_load(path.read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise TableError(f"{path.relative_to(ROOT)}: {' '.join(str(error).split())}") from None


def names() -> list[str]:
    """Names of all files of tables."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def evaluate(run: Run, result: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a run's result; raises TableError if the result lacks one."""
    values, variables = {}, {**result, "result": result}
    for name, expression in run.values.items():
        try:
            values[name] = TEMPLATES.compile_expression(expression, undefined_to_none=False)(**variables)
            json.dumps(values[name], allow_nan=False)
        except Exception as error:  # noqa: BLE001 - of any part of an expression
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


def read_recorded(name: str) -> dict[str, Recorded]:
    """Recorded runs of NAME.json by name."""
    path = FOLDER / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {run: Recorded.model_validate(values) for run, values in known.items()}


def write_recorded(name: str, known: Mapping[str, Recorded]) -> None:
    """Replace NAME.json; a run is a line."""
    lines = (f"{json.dumps(run)}: {values.model_dump_json()}" for run, values in known.items())
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def missing(tables: Tables, known: Mapping[str, Recorded]) -> Iterator[str]:
    """Runs that are not recorded, or with another command or other expressions."""
    for name, run in tables.runs.items():
        if name not in known or (known[name].command, known[name].expressions) != (run.command, run.values):
            yield name


def shown(run: Recorded) -> dict[str, Any]:
    """Values, command, CPU, date and seconds of a run."""
    return {**run.values, **run.model_dump(exclude={"values", "expressions"})}


def render(tables: Tables, known: Mapping[str, Recorded]) -> dict[str, str]:
    """Texts of the tables with their values; raises TableError if one is missing."""
    if lacking := list(missing(tables, known)):
        raise TableError(f"not recorded as the tables have them: {', '.join(lacking)}; run ./dev tables")
    if unknown := sorted(set(tables.uses) - set(names())):
        raise TableError(f"uses = {unknown[0]}: no such file of tables")
    files = {file: read_recorded(file) for file in tables.uses}
    other = {file: {name: shown(run) for name, run in found.items()} for file, found in files.items()}
    days = sorted({run.date for found in (known, *files.values()) for run in found.values()})
    runs = {name: shown(run) for name, run in known.items()}
    dates = " to ".join(sorted({*days[:1], *days[-1:]}))
    try:
        return {
            name: TEMPLATES.from_string(text).render(runs, other=other, dates=dates).strip("\n")
            for name, text in tables.tables.items()
        }
    except (TemplateError, LookupError, ValueError, TypeError) as error:
        raise TableError(f"text of a table: {error}") from None


def with_tables(page: str, texts: Mapping[str, str]) -> str:
    """A page with the texts of tables replaced; raises ValueError if the page has no place for one."""
    for name, text in texts.items():
        page = with_table(page, name, text)
    return page


def update(chosen: Sequence[str], again: Callable[[Run], bool]) -> None:
    """Run commands that are not recorded, and those that run again; record each as it ends, and write the pages."""
    results = dict[str, tuple[dict[str, Any], float]]()
    for number, name in enumerate(chosen, 1):
        tables, known = load(name), read_recorded(name)
        known = {run: known[run] for run in tables.runs if run in known}
        lacking = set(missing(tables, known))
        for run in [name for name, each in tables.runs.items() if name in lacking or again(each)]:
            print(f"tables: {number}/{len(chosen)} {name}: {tables.runs[run].command}", file=sys.stderr, flush=True)
            known[run] = record(tables.runs[run], results)
            write_recorded(name, known)
        if known:
            write_recorded(name, {run: known[run] for run in tables.runs})
    for name in names():
        tables = load(name)
        if name in chosen or set(tables.uses) & set(chosen):
            write_page(tables, read_recorded(name))


def write_page(tables: Tables, known: Mapping[str, Recorded]) -> None:
    """Write the tables into their page."""
    page = ROOT / tables.page
    try:
        page.write_text(with_tables(page.read_text(), render(tables, known)))
    except (OSError, ValueError) as error:
        raise TableError(f"{tables.page}: {error}") from None


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="./dev tables", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="files of tables; all without one")
    parser.add_argument("--missing", action="store_true", help="run only commands that are not recorded")
    parser.add_argument("--measured", action="store_true", help="run only these, and those that depend on the machine")
    parser.add_argument("--list", action="store_true", help="tables, their commands, and when they ran")
    options = parser.parse_args()
    try:
        if options.list:
            for name in options.names or names():
                for run in read_recorded(name).values():
                    print(f"{name}\t{run.date}\t{run.seconds:g} s\t{run.command}")
        else:
            whole = not (options.missing or options.measured)
            update(options.names or names(), lambda run: whole or (options.measured and run.measured))
    except TableError as error:
        sys.exit(f"tables: {error}")


if __name__ == "__main__":
    main()
