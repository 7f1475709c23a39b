"""Which tests reach which functions of the product: `./dev mutate --record-reach` records it for `./dev mutate`.

A test reaches what runs in its own process: not what a command does in a process that it starts, in a guest or in a
simulator. A plugin of pytest, since coverage by test of each line takes several times as long.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.conftest import DURATIONS, function_of
from tests.mutants.plant import PACKAGES, ROOT, module_name

RECORD = Path(__file__).with_name("reach.json")
MOST = 30  # tests that the record keeps of a function
_codes = set[CodeType]()  # that have run since a test began


def _watch(frame: FrameType, event: str, argument: object) -> None:
    _codes.add(frame.f_code)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Watch a test with its fixtures."""
    _codes.clear()
    threading.settrace(_watch)
    sys.settrace(_watch)
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Note the functions of the product that have run in the test's reports, which workers send."""
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type] # the stubs lack None, which the documentation has
    item.user_properties.append(("functions", sorted({name for code in _codes if (name := _name(code))})))


@functools.cache
def _name(code: CodeType) -> str:
    """The function, as `MODULE:NAME`, that a code is of or is nested in; an empty text if it isn't the product's."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PACKAGES:
        return ""
    name = code.co_qualname.partition(".<locals>")[0]
    return "" if name.startswith("<") else f"{module_name(path)}:{name}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the record; tests that did not run keep their functions."""
    functions: dict[str, set[str]] = defaultdict(set)
    for report in (entry for reports in terminalreporter.stats.values() for entry in reports):
        if getattr(report, "when", "") == "teardown":
            functions[function_of(report.nodeid)].update(dict(report.user_properties)["functions"])
    RECORD.write_text(record(_earlier(set(functions)) | functions, json.loads(DURATIONS.read_text())))


def record(functions: Mapping[str, set[str]], seconds: Mapping[str, float]) -> str:
    """Return the record's text: for each function the tests that take least, first the quickest of each file.

    Args:
        functions: Those that a test reaches.
        seconds: Duration of a test; a new one takes no time.
    """
    reaching: dict[str, list[tuple[int, str]]] = defaultdict(list)
    earlier: dict[tuple[str, str], int] = defaultdict(int)  # tests of a file that reach a function
    for test in sorted(functions, key=lambda test: (seconds.get(test, 0.0), test)):
        for function in functions[test]:
            file = test.partition("::")[0]
            reaching[function].append((earlier[file, function], test))
            earlier[file, function] += 1
    kept = {
        function: [test for _, test in sorted(ranked, key=lambda entry: entry[0])[:MOST]]
        for function, ranked in sorted(reaching.items())
    }
    tests = sorted({test for names in kept.values() for test in names})
    number = {test: at for at, test in enumerate(tests)}
    rows = [f"{json.dumps(function)}: {[number[test] for test in names]}" for function, names in kept.items()]
    listed, reached = ",\n".join(map(json.dumps, tests)), ",\n".join(rows)
    return f'{{"tests": [\n{listed}\n],\n"functions": {{\n{reached}\n}}}}\n'


def _earlier(ran: set[str]) -> dict[str, set[str]]:
    """Functions of recorded tests, but for those that ran."""
    functions: dict[str, set[str]] = defaultdict(set)
    for function in _recorded()["functions"] if RECORD.exists() else ():
        for test in tests_that_reach(function):
            functions[test].add(function)
    return {test: names for test, names in functions.items() if test not in ran}


@functools.cache
def _recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(RECORD.read_text())
    return recorded


def tests_that_reach(function: str) -> list[str]:
    """Tests, as `FILE::NAME`, that reach a function of the product, `MODULE:NAME`, in the record's order."""
    recorded = _recorded()
    tests = (recorded["tests"][number] for number in recorded["functions"].get(function, []))
    return [test for test in tests if _exists(test)]


@functools.cache
def _exists(test: str) -> bool:
    """Whether a recorded test has neither been renamed nor deleted since."""
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text(encoding="utf-8")
