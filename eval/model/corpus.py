"""Training text available on any machine: docstrings of Python and of our pinned packages.

None of it is evaluation text. Versions are fixed by constraints.txt, so the corpus is the same everywhere
but for the Python release's own standard library.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "torch", "transformers", "numba", "sympy", "hypothesis", "networkx", "rich", "typer", "pytest")
WITHHELD = ("that has no positive divisors other than",)  # stands in an article of SQuAD, word for word
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")  # fields that hold statements, in the grammar's order
_SKIP = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def docstrings(source: str) -> list[str]:
    """The cleaned module, class and function docstrings of one Python source text, in order of appearance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    texts = [ast.get_docstring(node) for node in _statements(tree) if isinstance(node, _DOCUMENTED)]
    return [text for text in texts if text]


def _statements(tree: ast.Module) -> Iterator[Any]:
    """A module and the statements in it, level by level, as `ast.walk` orders them; no expression holds a docstring."""
    level: list[Any] = [tree]
    while level:
        yield from level
        parts = (getattr(node, name, None) for node in level for name in _BODIES)
        level = [inner for part in parts if isinstance(part, list) for inner in part]


def _sources() -> list[Path]:
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = find_spec(package)
        if spec and spec.submodule_search_locations:
            roots.append(Path(next(iter(spec.submodule_search_locations))))
    paths: list[Path] = []
    for root in roots:
        inside = (path for path in root.rglob("*.py") if not _SKIP & set(path.relative_to(root).parts))
        paths += sorted(inside)
    return paths


def load_corpus(min_chars: int = 200) -> bytes:
    """All documentation strings of at least `min_chars` characters, each paragraph kept once, as UTF-8 bytes."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are live: scanning them repeatedly takes as long as building them
    try:
        for path in _sources():
            with suppress(SyntaxError, UnicodeDecodeError, ValueError):
                texts += docstrings(path.read_text(encoding="utf-8"))
    finally:
        if collecting:
            gc.enable()
    seen: set[str] = set()
    kept = []
    for text in texts:
        paragraphs = [p for p in inspect.cleandoc(text).split("\n\n") if p not in seen and not _withheld(p)]
        seen.update(paragraphs)
        fresh = "\n\n".join(paragraphs)
        if len(fresh) >= min_chars:
            kept.append(fresh)
    return "\n\n\n".join(kept).encode()


def _withheld(paragraph: str) -> bool:
    return any(
        all(word in paragraph for word in phrase.split()) and phrase in _spaced(paragraph) for phrase in WITHHELD
    )


def _spaced(paragraph: str) -> str:
    return " ".join(paragraph.split())


class Overlap:
    """Overlap of texts with a corpus: runs of n words, in lower case and without punctuation."""

    def __init__(self, corpus: str, n: int = 13) -> None:
        self.n = n
        self._known = set(self._grams(corpus))

    def with_text(self, text: str) -> list[str]:
        """Runs of words that a text shares with the corpus; held-out text must have none."""
        return [gram for gram in dict.fromkeys(self._grams(text)) if gram in self._known]

    def _grams(self, text: str) -> Iterator[str]:
        words = re.findall(r"\w+", text.lower())
        return (" ".join(words[at : at + self.n]) for at in range(len(words) - self.n + 1))
