"""Candidates for the list of mutants: one operator applied to one place of one function, chosen by a seed."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

from tests.mutants import plant
from tests.mutants.plant import Mutant, functions, module_name

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Replacements of a node: pairs of source text, old and new."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield ast.unparse(node), "pass"
        case ast.If(test=test, body=[ast.Raise() | ast.Continue() | ast.Return()]):
            yield ast.unparse(test), "False"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield ast.unparse(test), f"not ({ast.unparse(test)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield ast.unparse(node), ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))
        case ast.BoolOp(values=values):
            for dropped in values:
                rest = [each for each in values if each is not dropped]
                yield ast.unparse(node), ast.unparse(ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0])
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield ast.unparse(node), ast.unparse(ast.BinOp(left, other, right))
        case ast.Call(func=ast.Name(id="min" | "max"), args=[first, second]):
            yield ast.unparse(node), ast.unparse(first)
            yield ast.unparse(node), ast.unparse(second)


def candidates(path: Path) -> Iterator[Mutant]:
    """All mutants of a module's Python functions."""
    for name, node in functions(ast.parse(path.read_text(encoding="utf-8"))):
        if any("jit" in ast.unparse(each) or "intrinsic" in ast.unparse(each) for each in node.decorator_list):
            continue
        for part in (each for statement in node.body for each in ast.walk(statement)):
            for old, new in changes(part):
                yield Mutant(f"{module_name(path)}:{name}", old, new)


def propose(count: int, seed: int) -> list[Mutant]:
    """Mutants drawn from all packages, as many from each."""
    draw, found = random.Random(seed), list[Mutant]()
    for package in plant.PACKAGES:
        every = [mutant for path in sorted((plant.ROOT / package).rglob("*.py")) for mutant in candidates(path)]
        unlike = list({str(mutant): mutant for mutant in every if "\n" not in mutant.old}.values())
        found += draw.sample(unlike, min(len(unlike), -(-count // len(plant.PACKAGES))))
    return found
