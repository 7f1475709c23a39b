"""The account of durations, seeds and the profile of property tests."""

import random
from types import SimpleNamespace

from hypothesis import settings

from tests.conftest import pytest_terminal_summary
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
    pytest_terminal_summary(SimpleNamespace(stats=stats, section=lines.append, write_line=lines.append))
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
