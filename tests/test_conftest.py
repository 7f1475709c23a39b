"""The record of test durations, seeds and the profile of property tests."""

import json
import random
from types import SimpleNamespace

from hypothesis import settings

from tests.conftest import DURATIONS, QUICK_S, function_of, pytest_terminal_summary, quick_tests
from tests.properties import RANDOM


def account(*reports):
    """Lines that the account of durations writes; reports: (test, phase, seconds, slow)."""
    lines = []
    known = [
        SimpleNamespace(nodeid=test, when=phase, duration=seconds, keywords={"slow": 1} if slow else {})
        for test, phase, seconds, slow in reports
    ]
    stats = {
        "passed": [each for each in known if each.when == "call"],
        "": [each for each in known if each.when != "call"],
    }
    stats["warnings"] = [SimpleNamespace(message="no test report")]
    config = SimpleNamespace(getoption=lambda name: False)
    pytest_terminal_summary(SimpleNamespace(config=config, stats=stats, section=lines.append, write_line=lines.append))
    return lines


def test_durations_slow_fixtures_are_counted():
    reports = [
        ("a", "setup", 68.0, True),
        ("a", "call", 0.2, True),
        ("a", "teardown", 3.0, True),
        ("b", "call", 9.0, False),
    ]
    assert account(*reports)[-1] == "1 slow tests: 71 s of all workers together"


def test_durations_longest_are_listed_by_phase():
    longest = [("a", "setup", 68.0, False), ("a", "call", 0.2, False), ("a", "teardown", 3.0, False)]
    _, first, second, *rest = account(("b", "call", 9.0, False), *longest)
    assert first.split() == ["71.2", "=", "68.0", "0.2", "3.0", "a"]
    assert second.split() == ["9.0", "=", "0.0", "9.0", "0.0", "b"]
    assert not rest


def test_global_random_is_seeded_before_each_test():
    assert random.random() == random.Random(0).random()


def test_properties_default_examples_are_fixed():
    assert settings.default.derandomize == (settings.get_current_profile_name() != RANDOM)


def test_quick_tests_are_whole_files_that_take_least():
    seconds = {"a::x": 1.0, "a::y": 2.0, "b::x": 0.5, "c::x": 4.0}
    tests = [*seconds, "b::new"]
    assert quick_tests(tests, seconds, 3.6) == {"b::x", "b::new", "a::x", "a::y"}
    assert quick_tests(tests, seconds, 3.4) == {"b::x", "b::new"}
    assert quick_tests(tests, seconds, 100.0) == set(tests)
    assert function_of("tests/x.py::test_y[1-[2]]") == "tests/x.py::test_y"


def test_quick_tests_cover_most_functions():
    seconds = json.loads(DURATIONS.read_text())
    chosen = quick_tests(seconds, seconds)
    assert len(chosen) > len(seconds) / 2
    assert sum(seconds[test] for test in chosen) <= QUICK_S
