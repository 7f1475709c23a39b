"""Figures of the code base: sizes, import cycles, modules without a test. `./dev lint` prints them."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_PARAMETERS, MAX_FUNCTION_LINES = 7, 60
PACKAGES = {"eval": "vcsd_eval"}  # folders that are imported by another name
MAX_SHARED_NAMES = 10  # names that several classes have
EXEMPT = ("njit", "intrinsic", "command")  # decorators: kernels, and commands' declarations


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the project."""

    place: str
    lines: int
    parameters: int  # 0 where they are not counted


def modules() -> list[Path]:
    """Our Python files, tests left out, each once: `vcsd_eval` is a link to `eval`."""
    packages = sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
    folders = [folder for folder in packages if not folder.is_symlink()]
    return sorted(file.relative_to(ROOT) for folder in folders for file in folder.rglob("*.py"))


def module_name(file: Path) -> str:
    """Name by which a file is imported."""
    folder, *rest = file.with_suffix("").parts
    return ".".join([PACKAGES.get(folder, folder), *rest]).removesuffix(".__init__")


def functions(file: Path) -> Iterator[Function]:
    """Every function of a file; the parameter count of exempt functions is 0."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(arguments) - (bool(arguments) and arguments[0].arg in ("self", "cls"))
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            exempt = any(word in decorators for word in EXEMPT)
            exempt |= any("typer." in ast.unparse(argument.annotation) for argument in arguments if argument.annotation)
            lines = (node.end_lineno or 0) - node.lineno + 1
            yield Function(f"{file}:{node.lineno} {node.name}", lines, 0 if exempt else count)


def imports(file: Path, names: dict[str, Path]) -> set[Path]:
    """Our files that a file imports, wherever in it: in functions and for type checkers too."""
    imported = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            imported |= {names[name.name] for name in node.names if name.name in names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                imported |= {names[name] for name in (f"{node.module}.{alias.name}",) if name in names} or {
                    names[name] for name in (node.module,) if name in names
                }
    return imported - {file}


def import_cycles() -> list[list[str]]:
    """Groups of files that import each other, directly or not."""
    files = modules()
    names = {module_name(file): file for file in files}
    graph = {file: imports(file, names) for file in files}
    reach = {file: _reachable(graph, file) for file in files}
    groups = {
        frozenset(other for other in reach[file] if file in reach[other]) for file in files if file in reach[file]
    }
    return sorted(sorted(map(str, group)) for group in groups)


def _reachable(graph: dict[Path, set[Path]], start: Path) -> set[Path]:
    seen: set[Path] = set()
    waiting = list(graph[start])
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting += graph[file]
    return seen


def partners() -> Iterator[tuple[Path, str]]:
    """Tests, and the modules that each names in a line `partner of: a/b.py, a/c.py` of its docstring."""
    for test in (ROOT / "tests").rglob("test_*.py"):
        text = ast.get_docstring(ast.parse(test.read_text())) or ""
        for line in re.findall(r"partner of:(.*?)(?:\n\n|\Z)", text, re.DOTALL):
            for name in re.findall(r"[\w/]+\.py", line):
                yield test.relative_to(ROOT), name


def modules_without_test() -> list[str]:
    """Modules that no test is named after, and none names as its own."""
    named = {name for _, name in partners()}
    lacking = []
    for file in modules():
        test = ROOT / "tests" / file.with_name(f"test_{file.name.lstrip('_')}")
        if file.name not in ("__init__.py", "__main__.py") and not test.exists() and str(file) not in named:
            lacking.append(str(file))
    return lacking


def unknown_partners() -> list[str]:
    """Files that a test names as its own and that are not there."""
    names = {str(file) for file in modules()}
    return [f"{test}: {name}" for test, name in partners() if name not in names]


def shared_names() -> dict[str, list[str]]:
    """Names that several classes have, with the files that define them."""
    places: dict[str, list[str]] = {}
    for file in modules():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def by_folder(sizes: dict[str, int]) -> dict[str, int]:
    """Lines of our files by folder; of eval by its wings."""
    result: Counter[str] = Counter()
    for file, lines in sizes.items():
        folder, *rest = Path(file).parts
        result[f"eval/{rest[0]}" if folder == "eval" and len(rest) > 1 else folder] += lines
    return dict(sorted(result.items()))


def main() -> int:
    """Print the figures; returns 1 if one exceeds its limit."""
    every = [function for file in modules() for function in functions(file)]
    widest, longest = max(every, key=lambda f: f.parameters), max(every, key=lambda f: f.lines)
    sizes = {str(file): len((ROOT / file).read_text().splitlines()) for file in modules()}
    rows = (
        ("longest parameter list", widest.parameters, MAX_PARAMETERS, widest.place),
        ("longest function", longest.lines, MAX_FUNCTION_LINES, longest.place),
        ("import cycles", len(import_cycles()), 0, "; ".join(", ".join(cycle) for cycle in import_cycles())),
        ("names of several classes", len(shared_names()), MAX_SHARED_NAMES, ", ".join(shared_names())),
        ("modules without a test", len(modules_without_test()), 0, ", ".join(modules_without_test())),
    )
    for what, figure, limit, where in rows:
        print(f"{what}: {figure} of at most {limit}{'  ' if where else ''}{where}")
    print("lines:", ", ".join(f"{folder} {lines:,}" for folder, lines in by_folder(sizes).items()))
    return int(any(figure > limit for _, figure, limit, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
