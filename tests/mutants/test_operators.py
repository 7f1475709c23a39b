"""Random mutants: every operator changes the code at its place, and nothing else is changed."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.mutants import plant as planting
from tests.mutants.operators import candidates, draw
from tests.mutants.plant import Mutant, _mutated, find, mutated_text

CASES = {
    "statement dropped": ("a.append(b)", "pass"),
    "condition negated": ("if a: b = 1", "if not a: b = 1"),
    "comparison changed": ("c = a < b", "c = a <= b"),
    "condition dropped": ("c = a and b", "c = b"),
    "sign changed": ("c = a + b", "c = a - b"),
    "arguments swapped": ("c = f(a, b)", "c = f(b, a)"),
    "limit dropped": ("c = min(a, b)", "c = a"),
    "constant changed": ("c = a * 2", "c = a * 3"),
    "except widened": (
        "try: a\nexcept KeyError: b = a",
        "try: a\nexcept Exception: b = a",
    ),
}


def module_of(path: Path, body: str) -> Path:
    path.write_text(f"def work(f, a, b):\n{textwrap.indent(body, '    ')}\n")
    return path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(planting, "ROOT", tmp_path)
    monkeypatch.setattr(planting, "PACKAGES", ("shop",))
    (tmp_path / "shop").mkdir()
    return tmp_path / "shop" / "work.py"


def changed(mutant: Mutant, path: Path) -> str:
    tree = _mutated(mutant, path)
    assert tree is not None
    return ast.unparse(tree)


@pytest.mark.parametrize("operator", CASES)
def test_operator_changes_its_place(module: Path, tmp_path: Path, operator: str) -> None:
    before, after = CASES[operator]
    wanted = ast.unparse(ast.parse(module_of(tmp_path / "after.py", after).read_text()))
    mutants = [mutant for name, mutant in candidates(module_of(module, before)) if name == operator]
    results = [changed(mutant, module) for mutant in mutants]
    assert wanted in results and len(set(results)) == len(results)
    assert [ast.unparse(ast.parse(mutated_text(mutant))) for mutant in mutants] == results


def test_each_of_several_like_places_is_changed(module: Path) -> None:
    module_of(module, "a = f(b + 1)\nb = f(b + 1)\nreturn f(b + 1)")
    results = {changed(mutant, module) for name, mutant in candidates(module) if name == "sign changed"}
    assert len(results) == 3


def test_messages_annotations_and_assertions_are_kept(module: Path) -> None:
    module_of(module, 'c: int = 1 + 2\nassert a < 1, f"{a + 1}"\nif a: raise ValueError(f"{b + 1}")')
    assert [str(mutant) for _, mutant in candidates(module)] == [
        "shop.work:work: a -> not a (2)",
        "shop.work:work: raise ValueError(f'{b + 1}') -> pass",
    ]


def test_code_of_kernels_is_not_changed(module: Path) -> None:
    module.write_text(
        "def work(builder, a):\n    return builder.add(a, a + 1)\n"
        "def made(a):\n    def generate(context, builder):\n        return builder.add(a, 1)\n    return generate\n"
        "@njit\ndef loop(a):\n    return a + 1\n"
    )
    assert not [*candidates(module)]


def test_size_of_an_axis_that_is_whatever_is_left_is_not_changed(module: Path) -> None:
    module_of(module, "return a.reshape(-1, 4)")
    assert [str(mutant) for name, mutant in candidates(module) if name == "constant changed"] == [
        "shop.work:work: 4 -> 5"
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_strict_lengths_are_an_assertion_and_others_are_not(module: Path, strict: bool) -> None:
    module_of(module, f"return zip(a, a, strict={strict})")
    assert len([*candidates(module)]) == (not strict)


def test_mutants_are_drawn_by_seed_from_all_modules() -> None:
    some = draw(60, 3)
    assert some == draw(60, 3) != draw(60, 4) and len(set(some)) == 60
    assert len({mutant.at.split(".")[0] for mutant in some}) >= 8
    for mutant in some:
        path = find(mutant)
        assert changed(mutant, path) != ast.unparse(ast.parse(path.read_text()))
