"""Compiled code is cached, and compiled again when anything it depends on changes."""

import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter
from types import ModuleType

import numpy as np
import pytest

from csd_io.compiled import _dependencies, _is_plain
from tests.code_limits import ROOT

CALLER = """
from csd_io.compiled import njit
from {package}.callee import {names}
{more}

OWN = 1

@njit(cache=True)
def whole(x):
    return {body}

print(whole(2), whole.stats.cache_hits.total())
"""
CALLEE = """
from csd_io.compiled import njit
from {package}.third import BASE

FACTOR = {factor}

@njit(cache=True)
def times(x):
    return {factor} * x + BASE
"""


@pytest.fixture
def package(tmp_path):
    """A package whose compiled function calls a second file's function, which uses a constant of a third file."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "__init__.py").touch()

    def write(factor=3, base=0, names="times", body="times(x) + OWN", more="", fields=("first", "second")):
        pair = f"class Pair(NamedTuple):\n    {fields[0]}: int\n    {fields[1]}: int\n"
        third = f"import numpy as np\nfrom typing import NamedTuple\nBASE = {base}\nTABLE = np.array([BASE])\n"
        (folder / "third.py").write_text(third + pair)
        (folder / "callee.py").write_text(CALLEE.format(package="made", factor=factor))
        (folder / "caller.py").write_text(CALLER.format(package="made", names=names, body=body, more=more))

    def run():
        command = [sys.executable, "-c", "import made.caller"]
        environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    return write, run


def test_compiled_cache_hits_if_unchanged(package):
    write, run = package
    write()
    assert run() == [7, 0]
    assert run() == [7, 1]
    write()  # as it was, but for its time
    assert run() == [7, 1]


@pytest.mark.parametrize(("changed", "result"), [({"factor": 5}, 11), ({"base": 10}, 17), ({"body": "times(x)"}, 6)])
def test_change_of_imported_code_recompiles(package, changed, result):
    write, run = package
    write()
    assert run() == [7, 0]
    write(**changed)
    assert run() == [result, 0]


def test_change_of_imported_constant_recompiles(package):
    write, run = package
    for factor, result in ((3, 6), (4, 8)):
        write(factor, names="FACTOR", body="FACTOR * x")
        assert run() == [result, 0]


@pytest.mark.parametrize(
    "way", ["from made.third import TABLE as IT", "from made import third", "import made.third as it"]
)
def test_change_of_module_attribute_recompiles(package, way):
    write, run = package
    body = {"TABLE": "IT[0] * x", "made import": "third.BASE * x", "as it": "it.BASE * x"}
    body = next(text for key, text in body.items() if key in way)
    for base, hits in ((3, 0), (3, 1), (5, 0)):
        write(base=base, body=body, more=way)
        assert run() == [2 * base, hits]


def test_order_of_a_tuples_fields_is_seen(package):
    write, run = package
    for fields, result in ((("first", "second"), 2), (("second", "first"), 10)):
        write(body="Pair(x, 10).first", more="from made.third import Pair", fields=fields)
        assert run() == [result, 0]


def test_key_of_function_tuple_has_no_address(package):
    write, run = package
    for hits in (0, 1):
        write(more="STEPS = (times, len)")
        assert run() == [7, hits]


def test_functions_of_plain_file_are_cached(tmp_path):
    """As a user's file with methods is loaded."""
    path = tmp_path / "methods.py"
    for factor in (2, 2, 30):  # another size: Python compares those, and seconds
        path.write_text(f"import numba\n\n@numba.njit(cache=True)\ndef times(x):\n    return {factor} * x\n")
        spec = importlib.util.spec_from_file_location("never_imported", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.times(5) == 5 * factor
    assert list((tmp_path / "__pycache__").glob("*.nbi"))


def test_all_kernels_use_the_cached_decorator():
    """numba's own decorator would keep stale code."""
    folders = {path.parent.resolve() for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
    files = [file for folder in folders for file in folder.rglob("*.py") if file.name != "compiled.py"]
    assert len(files) > 100
    assert not [file for file in files if re.search(r"^from numba import .*\bnjit\b", file.read_text(), re.MULTILINE)]


TUPLE = """
from typing import NamedTuple
from csd_io.compiled import njit

class {name}(NamedTuple):
    a: int

@njit(cache=True)
def first(values):
    return values.a

print(first({name}(3)), first.stats.cache_hits.total())
"""


def test_renamed_tuple_class_is_compiled_again(package, tmp_path):
    """The index of a cache has its classes by name; one of the old name cannot be read."""
    write, run = package
    write()
    for name, hits in (("Old", 0), ("Old", 1), ("New", 0), ("New", 1)):
        (tmp_path / "made" / "caller.py").write_text(TUPLE.format(name=name))
        assert run() == [3, hits]


def test_values_that_their_repr_identifies():
    """The key of a compiled function must change with them, and not from run to run."""
    for plain in (True, 7, 0.5, "a", np.float32(2), (), (1, ("a", 2.0))):
        assert _is_plain(plain)
    for other in (None, object(), [1], (1, object()), (1, (len,)), {"a": 1}):
        assert not _is_plain(other)


def test_functions_and_tuple_classes_are_dependencies_and_other_classes_are_not():
    here = ModuleType("here")
    here.walk, here.Counter, here.Frame, here.paths = os.walk, Counter, inspect.FrameInfo, pathlib
    assert _dependencies(here) == {"os", "inspect", "pathlib"}
