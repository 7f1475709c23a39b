"""The record of which tests reach which functions."""

import json
from types import SimpleNamespace

from ftl.kv.owners import Owners
from tests.mutants import reach


def test_functions_of_the_product_that_a_test_runs_are_noted() -> None:
    item = SimpleNamespace(user_properties=[])
    setup, teardown = reach.pytest_runtest_setup(), reach.pytest_runtest_teardown(item)
    next(setup)
    Owners().new(1, 0)
    next(teardown)
    assert next(teardown, None) is None
    [(name, functions)] = item.user_properties
    assert name == "functions" and functions == ["ftl.kv.owners:Owners.__init__", "ftl.kv.owners:Owners.new"]
    Owners().share([], 2)
    assert "ftl.kv.owners:Owners.share" not in {reach._name(code) for code in reach._codes}


def test_record_keeps_quick_tests_of_different_files_first() -> None:
    seconds = {"a::slow": 3.0, "a::quick": 1.0, "b::long": 9.0}
    functions = {test: {"m:f"} for test in (*seconds, "a::new")} | {"b::other": {"m:g"}}
    recorded = json.loads(reach.record(functions, seconds))
    by_function = {name: [recorded["tests"][at] for at in tests] for name, tests in recorded["functions"].items()}
    assert by_function == {"m:f": ["a::new", "b::long", "a::quick", "a::slow"], "m:g": ["b::other"]}


def test_tests_that_are_gone_are_left_out(monkeypatch) -> None:
    here = "tests/mutants/test_reach.py"
    recorded = {
        "tests": [f"{here}::test_tests_that_are_gone_are_left_out", f"{here}::test_gone", "tests/test_gone.py::test"],
        "functions": {"m:f": [2, 1, 0]},
    }
    monkeypatch.setattr(reach, "_recorded", lambda: recorded)
    assert reach.tests_that_reach("m:f") == recorded["tests"][:1] and reach.tests_that_reach("m:g") == []
