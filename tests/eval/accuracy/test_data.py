"""Data files by their usual names."""

import pytest

from vcsd_eval.accuracy.data import NAMES, find, needs_file
from vcsd_eval.accuracy.tasks import TASKS


def test_find_takes_the_first_usual_name(tmp_path, monkeypatch):
    monkeypatch.setenv("VCSD_DATA", str(tmp_path))
    assert find("wikitext") is None
    (tmp_path / "wiki.test.raw").write_text("x")
    assert find("wikitext") == tmp_path / "wiki.test.raw"
    (tmp_path / "wikitext-2-raw-test.txt").write_text("x")
    assert find("wikitext") == tmp_path / "wikitext-2-raw-test.txt"
    assert find("squad") is None


@pytest.mark.parametrize("value", [None, ""])
def test_find_without_the_variable_is_none(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinyshakespeare.txt").write_text("x")
    monkeypatch.delenv("VCSD_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("VCSD_DATA", value)
    assert find("shakespeare") is None


def test_missing_data_error_names_option_and_variable():
    says = "^--data is needed: a text; or name a folder by VCSD_DATA that has wikitext-2-raw-test.txt or wiki.test.raw$"
    with pytest.raises(ValueError, match=says):
        needs_file(None, "wikitext", "a text")


def test_every_data_kind_belongs_to_a_task_or_trace():
    assert {task.kind for task in TASKS.values()} == {"", *NAMES} - {"orbitflow", "mooncake"}
