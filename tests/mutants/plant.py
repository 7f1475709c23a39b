"""Mutants: small changes of the product's functions, planted in a running process.

A mutant names a function and a part of its syntax tree. So it stays valid when code is reformatted, when other lines
change, and when the function moves to another module.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.yaml")
PACKAGES = (
    "csd_spec",
    "csd_io",
    "csd_link",
    "ftl",
    "attention_engine",
    "kv_cache",
    "csd_firmware",
    "host_driver",
    "nvmevirt_config",
    "fleet",
    "vcsd",
    "vcsd_cli",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one function.

    Attributes:
        at: `module:function` or `module:Class.method`.
        old: A statement or an expression of the function, as source text.
        new: Replacement of `old`.
        which: Index of the occurrence of `old` in the function, if it occurs several times.
        equivalent: Reason why no test can catch the mutant; empty for all others.
        quick: Whether CI plants the mutant: its partners' tests are short.
    """

    at: str
    old: str
    new: str
    which: int = 0
    equivalent: str = ""
    quick: bool = False

    @property
    def name(self) -> str:
        """Qualified name of the function in its module."""
        return self.at.split(":")[1]

    def __str__(self) -> str:
        return f"{self.at}: {self.old} -> {self.new}" + (f" ({self.which})" if self.which else "")


class Stale(ValueError):
    """The code that a mutant changes is missing, or several modules have it."""


def load(file: Path = LIST) -> list[Mutant]:
    """Mutants of a list; raises ValueError for a mutant that it has twice."""
    mutants = [Mutant(**each) for each in yaml.safe_load(file.read_text(encoding="utf-8"))]
    if len({str(mutant) for mutant in mutants}) < len(mutants):
        raise ValueError(f"{file}: a mutant is there twice")
    return mutants


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes, each with its qualified name; none that are nested."""
    waiting: list[tuple[str, ast.stmt]] = [("", node) for node in tree.body]
    while waiting:
        prefix, node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            waiting += [(f"{prefix}{node.name}.", each) for each in node.body]


def find(mutant: Mutant) -> Path:
    """Module with the code that a mutant changes: the named one, otherwise the only other one.

    Raises:
        Stale: No module has such code, or several others have.
    """
    module = ROOT / mutant.at.split(":")[0].replace(".", "/")
    for named in (module.with_suffix(".py"), module / "__init__.py"):
        if named.exists() and _mutated(mutant, named):
            return named
    others = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if _mutated(mutant, path)]
    if len(others) != 1:
        raise Stale(f"{mutant}: {len(others)} modules have such code")
    return others[0]


def plant(mutant: Mutant) -> None:
    """Change the function in this process for all its callers.

    Raises:
        Stale: See `find`.
        TypeError: The function is compiled by Numba.
    """
    path = find(mutant)
    tree = _mutated(mutant, path)
    assert tree is not None
    function = _function(importlib.import_module(module_name(path)), mutant.name)
    whole = compile(ast.fix_missing_locations(tree), str(path), "exec")
    first = function.__code__.co_firstlineno  # tells the getter of a property from its setter
    code = next(each for each in _codes(whole) if (each.co_qualname, each.co_firstlineno) == (mutant.name, first))
    function.__code__ = code


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all nodes in it, in the order in which a mutant counts them."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)


def mutated_text(mutant: Mutant) -> str:
    """Text of the module with the change; comments stay, which type checkers read."""
    raw = find(mutant).read_bytes()
    function = next(node for name, node in functions(ast.parse(raw)) if name == mutant.name)
    replace = _Replace(mutant)
    kind = ast.expr if replace.expression else ast.stmt
    alike = [node for node in in_order(function) if isinstance(node, kind) and ast.dump(node) == replace.old]
    node = alike[mutant.which]
    assert node.end_lineno is not None and node.end_col_offset is not None
    lines = raw.splitlines(keepends=True)
    first = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    new = f"({mutant.new})" if replace.expression else mutant.new
    return (raw[:first] + new.encode() + raw[end:]).decode()


def module_name(path: Path) -> str:
    """Name by which a module is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


class _Replace(ast.NodeTransformer):
    """Replaces one occurrence of a statement or an expression."""

    def __init__(self, mutant: Mutant) -> None:
        self.left = mutant.which
        old, new = ast.parse(mutant.old).body, ast.parse(mutant.new).body
        self.expression = all(len(part) == 1 and isinstance(part[0], ast.Expr) for part in (old, new))
        self.old = ast.dump(old[0].value if self.expression else old[0])  # type: ignore[attr-defined]
        self.new: Any = new[0].value if self.expression else new  # type: ignore[attr-defined]
        self.done = False

    def visit(self, node: ast.AST) -> Any:
        if not self.done and isinstance(node, ast.expr if self.expression else ast.stmt) and ast.dump(node) == self.old:
            self.left -= 1
            if self.left < 0:
                self.done = True
                for each in self.new if isinstance(self.new, list) else [self.new]:
                    for part in ast.walk(each):
                        ast.copy_location(part, node)
                return self.new
        return self.generic_visit(node)


def _mutated(mutant: Mutant, path: Path) -> ast.Module | None:
    """Syntax tree of a module with the change; None if it has no such code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, node in functions(tree):
        if name == mutant.name:
            replace = _Replace(mutant)
            replace.visit(node)
            if replace.done:
                return tree
    return None


def _function(module: ModuleType, name: str) -> FunctionType:
    """The undecorated Python function."""
    result: Any = module
    for part in name.split("."):
        result = inspect.getattr_static(result, part)
    while not isinstance(result, FunctionType) or hasattr(result, "__wrapped__"):
        if isinstance(result, staticmethod | classmethod):
            result = result.__func__
        elif isinstance(result, property):
            result = result.fget
        elif isinstance(result, functools.cached_property):
            result = result.func
        elif hasattr(result, "__wrapped__"):
            result = result.__wrapped__
        else:
            raise TypeError(f"{name} is not a function of Python: {type(result).__name__}")
    return result


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
