"""Paths with a home folder and variables.

partner of: csd_io/paths.py
"""

from pathlib import Path

import pytest

from csd_io.paths import expand


def test_home_and_variables_are_replaced(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("DATA", "/data")
    written = {"~/x": "/home/ann/x", "$DATA/x": "/data/x", "${DATA}/x": "/data/x", "a~/x": "a~/x", "/a/../b": "/a/../b"}
    assert {text: str(expand(Path(text))) for text in written} == written


@pytest.mark.parametrize(("text", "says"), [("$NO/x", r"\$NO is not set"), ("~nobody-here/x", "~nobody-here")])
def test_unknown_variable_and_user_are_named(text, says):
    with pytest.raises(ValueError, match=says):
        expand(Path(text))


def test_file_with_such_a_name_is_itself(tmp_path):
    (tmp_path / "a$b").touch()
    assert expand(tmp_path / "a$b") == tmp_path / "a$b"
