"""The code base stays within its limits: sizes, no import cycles, a test for each module. `./dev lint` prints the
figures.
"""

import pytest

from tests import code_limits


def test_no_import_cycles():
    assert code_limits.import_cycles() == []


def test_functions_stay_small():
    every = [function for file in code_limits.modules() for function in code_limits.functions(file)]
    assert len(every) > 1000
    assert [each for each in every if each.parameters > code_limits.MAX_PARAMETERS] == []
    assert [each for each in every if each.lines > code_limits.MAX_FUNCTION_LINES] == []


def test_lines_are_counted_by_folder():
    sizes = {"ftl/a.py": 3, "ftl/kv/b.py": 4, "eval/c.py": 5, "eval/papers/d.py": 6}
    assert code_limits.by_folder(sizes) == {"eval": 5, "eval/papers": 6, "ftl": 7}


def test_shared_class_names_are_within_limit():
    assert len(code_limits.shared_names()) <= code_limits.MAX_SHARED_NAMES


def test_shared_class_names_are_found(tmp_path, monkeypatch):
    package = tmp_path / "ours"
    package.mkdir()
    for name, text in (("__init__", ""), ("a", "class One: ...\nclass Two: ..."), ("b", "class One: ...")):
        (package / f"{name}.py").write_text(text)
    monkeypatch.setattr(code_limits, "ROOT", tmp_path)
    assert code_limits.shared_names() == {"One": ["ours/a.py", "ours/b.py"]}


def test_every_module_has_a_test():
    assert code_limits.modules_without_test() == []
    assert code_limits.unknown_partners() == []


@pytest.mark.parametrize("block", ["from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    ", "def later():\n    "])
def test_import_cycle_is_found_in_any_scope(tmp_path, monkeypatch, block):
    package = tmp_path / "ours"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(f"{block}from ours.b import second\n")
    (package / "b.py").write_text("from ours import c\nsecond = c\n")
    (package / "c.py").write_text("import ours.a\n")
    monkeypatch.setattr(code_limits, "ROOT", tmp_path)
    assert code_limits.import_cycles() == [["ours/a.py", "ours/b.py", "ours/c.py"]]


def test_import_cycle_is_found_in_folder_of_another_name(tmp_path, monkeypatch):
    (tmp_path / "eval").mkdir()
    (tmp_path / "vcsd_eval").symlink_to("eval")
    for name, text in (("__init__", ""), ("a", "import vcsd_eval.b"), ("b", "from vcsd_eval import a")):
        (tmp_path / "eval" / f"{name}.py").write_text(text)
    monkeypatch.setattr(code_limits, "ROOT", tmp_path)
    assert code_limits.import_cycles() == [["eval/a.py", "eval/b.py"]]


def test_kernels_are_exempt_from_function_limits(tmp_path, monkeypatch):
    many = ", ".join(f"a{number}" for number in range(9))
    (tmp_path / "file.py").write_text(
        f"@njit\ndef kernel({many}): ...\n\n\ndef plain({many}): ...\n\n\nclass C:\n    def method(self, a): ...\n"
    )
    monkeypatch.setattr(code_limits, "ROOT", tmp_path)
    result = {function.place.split()[-1]: function.parameters for function in code_limits.functions("file.py")}
    assert result == {"kernel": 0, "plain": 9, "method": 1}
