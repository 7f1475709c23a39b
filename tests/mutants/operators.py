"""Random mutants: one operator applied to one place of one function of the product, drawn by a seed.

Nobody chooses where: every module with functions is as likely as any other, in it every operator that has a place, then
every place. Not changed are texts (of errors, too), annotations, assertions, also those of equal lengths that
`zip(strict=True)` makes, functions that Numba compiles, and those that make code for it: compiled kernels are cached.
"""

from __future__ import annotations

import ast
import functools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.mutants import plant
from tests.mutants.plant import Mutant, functions, in_order, module_name

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
SYMMETRIC = ("min", "max", "minimum", "maximum", "gcd", "isclose", "array_equal")  # functions of two like arguments
PLAIN = (ast.Assert, ast.Raise, ast.JoinedStr, ast.AnnAssign)  # nothing in them is changed; raises may be dropped


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Changes of a node: operator, part that is replaced, and its replacement."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield "statement dropped", node, ast.Pass()
        case ast.Raise():
            yield "statement dropped", node, ast.Pass()
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "condition negated", test, ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=[test, *_]):
            yield "condition negated", test, ast.UnaryOp(ast.Not(), test)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield "comparison changed", node, ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BoolOp(values=values):
            for dropped in values:
                rest = [value for value in values if value is not dropped]
                yield "condition dropped", node, ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield "sign changed", node, ast.BinOp(left, other, right)
        case ast.Call(args=[first, second, *rest], func=func, keywords=words) if ast.dump(first) != ast.dump(second):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not starred and ast.unparse(func).rpartition(".")[2] not in SYMMETRIC:
                yield "arguments swapped", node, ast.Call(func, [second, first, *rest], words)
            if isinstance(func, ast.Name) and func.id in ("min", "max") and not rest:
                yield "limit dropped", node, first
                yield "limit dropped", node, second
        case ast.Constant(value=bool()):
            yield "constant changed", node, ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant changed", node, ast.Constant(node.value + 1)
        case ast.ExceptHandler(type=ast.expr() as kind) if ast.unparse(kind) not in ("Exception", "BaseException"):
            yield "except widened", kind, ast.Name("Exception", ast.Load())


def candidates(path: Path) -> Iterator[tuple[str, Mutant]]:
    """All mutants of a module's Python functions, each after its operator."""
    for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
        if any("jit" in ast.unparse(each) or "intrinsic" in ast.unparse(each) for each in function.decorator_list):
            continue
        if any(isinstance(node, ast.arg) and node.arg == "builder" for node in ast.walk(function)):
            continue  # it makes LLVM instructions of a kernel, which is loaded as it was compiled before
        number_of = _numbers(function)
        for part in (part for statement in function.body for part in _changed(statement)):
            for operator, old, new in changes(part):
                before = ast.unparse(old)
                if "super()" not in before:  # a function without it is another closure
                    yield operator, Mutant(f"{module_name(path)}:{name}", before, ast.unparse(new), number_of[id(old)])


def _numbers(function: ast.FunctionDef) -> dict[int, int]:
    """For each node by its id: how many nodes before it are written alike."""
    counts, numbers = Counter[str](), dict[int, int]()
    for node in in_order(function):
        if isinstance(node, ast.expr | ast.stmt):
            code = ast.dump(node)
            numbers[id(node)] = counts[code]
            counts[code] += 1
    return numbers


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that operators may change."""
    yield node
    if not isinstance(node, PLAIN):
        unchanged = {id(part) for part in _unchanged(node)}
        for child in ast.iter_child_nodes(node):
            if id(child) not in unchanged:
                yield from _changed(child)


def _unchanged(node: ast.AST) -> list[ast.AST | None]:
    """Parts that no operator changes: annotations, an assertion in the form of an argument, and the size -1 of an axis.

    NumPy takes any negative number for an axis of whatever size is left.
    """
    match node:
        case ast.FunctionDef():
            return [node.args, node.returns, *node.decorator_list]
        case ast.keyword(arg="strict", value=ast.Constant(value=True)):
            return [node.value]
        case ast.Call(func=ast.Attribute(attr="reshape"), args=sizes):
            return [size for size in sizes if ast.unparse(size) == "-1"]
    return []


@functools.cache
def _by_operator(path: Path) -> dict[str, list[Mutant]]:
    result: dict[str, list[Mutant]] = {}
    for operator, mutant in candidates(path):
        result.setdefault(operator, []).append(mutant)
    return result


def draw(count: int, seed: int) -> list[Mutant]:
    """Return `count` different mutants of all product modules."""
    chance, result = random.Random(seed), dict[str, Mutant]()
    paths = [path for package in plant.PACKAGES for path in sorted((plant.ROOT / package).rglob("*.py"))]
    while len(result) < count:
        module = _by_operator(chance.choice(paths))
        if module:
            mutant = chance.choice(module[chance.choice(sorted(module))])
            result[str(mutant)] = mutant
    return list(result.values())
