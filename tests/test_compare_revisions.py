"""Differences that `./dev same` reports."""

import pytest

from tests.compare_revisions import differences

OLD = {"rows": [{"step_us": 654.9, "equal": True, "wall_s": 3.0}], "name": "sparf"}


def changed(**fields):
    return {**OLD, "rows": [OLD["rows"][0] | fields]}


def test_equal_figures_have_no_differences():
    assert not list(differences(OLD, changed(wall_s=9.0, more=1)))  # emulator time, and what only the new one has


@pytest.mark.parametrize("within", [0.0, 1e-7])
def test_a_change_of_a_millionth_is_found(within):
    result = list(differences(OLD, changed(step_us=654.9 * (1 + 1e-6)), within=within))
    assert len(result) == 1 and result[0].startswith(".rows[0].step_us: 654.9 before")


def test_numbers_may_differ_within_tolerance():
    assert not list(differences(OLD, changed(step_us=654.9 * (1 + 1e-6)), within=2e-6))


@pytest.mark.parametrize("fields", [{"equal": False}, {"equal": 1.5}, {"step_us": "654.9"}, {"step_us": None}])
def test_other_values_must_be_equal(fields):
    assert len(list(differences(OLD, changed(**fields), within=0.9))) == 1
