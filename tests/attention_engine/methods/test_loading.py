"""User-defined methods: loading from a file and from a plug-in, and methods that are refused.

partner of: attention_engine/methods/__init__.py
"""

import pytest

from attention_engine import METHODS, load_methods
from attention_engine.methods import _TABLES

OURS = dict(METHODS)


def written(tmp_path, text):
    file = tmp_path / "mine.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        "from attention_engine import METHODS\ndef mine(step): ...\nMETHODS['mine'] = mine\n",
        "def mine(step): ...\nMETHODS = {'mine': mine}\n",
        "import attention_engine\ndef mine(step): ...\nMETHODS = attention_engine.METHODS | {'mine': mine}\n",
    ],
)
def test_file_adds_methods_to_copy_of_table(tmp_path, text):
    table = load_methods(written(tmp_path, text))
    assert list(table) == [*OURS, "mine"]
    assert METHODS == OURS
    assert load_methods() == OURS


@pytest.mark.parametrize("length", [1, 32])
def test_shortest_and_longest_names_are_taken(tmp_path, length):
    assert "a" * length in load_methods(written(tmp_path, f"METHODS = {{'a' * {length}: print}}"))


def test_a_file_is_run_once_until_it_changes(tmp_path):
    file = written(tmp_path, "def mine(step): ...\nMETHODS = {'mine': mine}\n")
    assert load_methods(file)["mine"] is load_methods(file)["mine"]


def test_method_sees_globals_of_its_file(tmp_path):
    text = "METHODS['one'] = lambda step: 1\nMETHODS['two'] = lambda step: METHODS['one'](step) + 1\n"
    text = f"from attention_engine import METHODS\n{text}"
    assert load_methods(written(tmp_path, text))["two"](None) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("x = 1", "has no METHODS"),
        ("METHODS = {'a' * 33: print}", "1 to 32 ASCII"),
        ("METHODS = {'': print}", "1 to 32 ASCII"),
        ("METHODS = {'ümlaut': print}", "1 to 32 ASCII"),
        ("METHODS = {7: print}", "1 to 32 ASCII"),
        ("METHODS = {'mine': 7}", "7 is not a function"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path, text, reason):
    with pytest.raises(ValueError, match=reason) as error:
        load_methods(written(tmp_path, text))
    assert "mine.py" in str(error.value)
    assert METHODS == OURS


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Install a package with a method, whose module has this text."""

    def install(text):
        (tmp_path / "extra.py").write_text(text)
        info = tmp_path / "extra-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[vcsd.methods]\nextra = extra:extra\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(__import__("sys").modules, "extra", raising=False)
        type(_TABLES).plugged_in.cache_clear()

    yield install
    type(_TABLES).plugged_in.cache_clear()


def test_entry_point_of_package_adds_methods(plug_in):
    plug_in("def extra(step): return 5\n")
    assert load_methods()["extra"](None) == 5
    assert METHODS == OURS


def test_failing_entry_point_is_named(plug_in):
    plug_in("raise OSError('broken')\n")
    with pytest.raises(ValueError, match=r"plug-in extra:extra: OSError: broken"):
        load_methods()
