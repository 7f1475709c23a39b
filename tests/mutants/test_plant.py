"""Mutants are planted at their stated place, for every caller, and found again after a move."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import plant as planting
from tests.mutants.plant import PACKAGES, Mutant, Stale, find, load, plant

SOURCE = """
from functools import cached_property, wraps


def kept(function):
    @wraps(function)
    def call(*args):
        return function(*args)

    return call


@kept
def add(a, b):
    if a > 0:
        a = a + b
    return a + b


class Box:
    def __init__(self, size):
        self.size = size

    @property
    def width(self):
        return self.size * 2

    @width.setter
    def width(self, width):
        self.size = width

    @cached_property
    def area(self):
        return self.size * self.size

    @classmethod
    def unit(cls):
        return cls(1)
"""


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `shop` with a module `boxes`, as the only code that there is."""
    file = tmp_path / "shop" / "boxes.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    monkeypatch.setattr(planting, "ROOT", tmp_path)
    monkeypatch.setattr(planting, "PACKAGES", ("shop",))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shop", "shop.boxes", "shop.crates"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return file


def test_planted_function_changes_for_importers(boxes: Path) -> None:
    from shop.boxes import add  # type: ignore[import-not-found]

    plant(Mutant("shop.boxes:add", "a > 0", "a < 0"))
    assert (add(1, 2), add(-1, 2)) == (3, 3)


def test_mutant_which_selects_an_occurrence(boxes: Path) -> None:
    from shop.boxes import add

    plant(Mutant("shop.boxes:add", "a + b", "a - b", which=1))
    assert add(1, 2) == 1


def test_mutant_drops_a_statement(boxes: Path) -> None:
    from shop.boxes import add

    plant(Mutant("shop.boxes:add", "a = a + b", "pass"))
    assert add(1, 2) == 3


def test_decorated_methods_are_mutated(boxes: Path) -> None:
    from shop.boxes import Box

    plant(Mutant("shop.boxes:Box.width", "self.size * 2", "self.size * 3"))
    plant(Mutant("shop.boxes:Box.area", "self.size * self.size", "self.size"))
    plant(Mutant("shop.boxes:Box.unit", "cls(1)", "cls(5)"))
    box = Box.unit()
    assert (box.width, box.area) == (15, 5)
    box.width = 7
    assert box.size == 7


def test_mutant_is_found_after_move_and_reformat(boxes: Path) -> None:
    moved = boxes.with_name("crates.py")
    boxes.rename(moved)
    moved.write_text(moved.read_text().replace("a + b", "(a\n        + b)"))
    assert find(Mutant("shop.boxes:add", "a = a + b", "pass")) == moved


@pytest.mark.parametrize("change", [{"old": "a > 1"}, {"at": "shop.boxes:sub"}, {"which": 1}])
def test_mutant_without_its_code_is_stale(boxes: Path, change: dict[str, object]) -> None:
    with pytest.raises(Stale, match="0 modules have such code"):
        find(replace(Mutant("shop.boxes:add", "a > 0", "a < 0"), **change))


def test_mutant_with_code_in_two_modules_is_stale(boxes: Path) -> None:
    boxes.with_name("crates.py").write_text(SOURCE)
    with pytest.raises(Stale, match="2 modules have such code"):
        find(Mutant("shop.gone:add", "a > 0", "a < 0"))


def test_every_listed_mutant_has_its_code() -> None:
    mutants = load()
    assert len([mutant for mutant in mutants if not mutant.equivalent]) >= 150
    assert {mutant.at.split(".")[0] for mutant in mutants} <= set(PACKAGES)
    for mutant in mutants:
        find(mutant)
