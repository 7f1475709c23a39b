"""Training text that any machine has: the documentation strings of Python and of our pinned packages.

None of it is evaluation text. Versions are fixed by constraints.txt, so the corpus is the same everywhere
but for the Python release's own standard library.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "numba", "sympy", "hypothesis", "networkx", "rich", "typer", "pytest")
WITHHELD = ("that has no positive divisors other than",)  # stands in an article of SQuAD, word for word
_SKIP = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def docstrings(source: str) -> list[str]:
    """The cleaned module, class and function docstrings of one Python source text, in order of appearance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in texts if text]


def _sources() -> list[Path]:
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = find_spec(package)
        if spec and spec.submodule_search_locations:
            roots.append(Path(next(iter(spec.submodule_search_locations))))
    found: list[Path] = []
    for root in roots:
        inside = (path for path in root.rglob("*.py") if not _SKIP & set(path.relative_to(root).parts))
        found += sorted(inside)
    return found


def load_corpus(min_chars: int = 200) -> bytes:
    """All documentation strings of at least `min_chars` characters, each paragraph kept once, as UTF-8 bytes."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    for path in _sources():
        try:
            texts += docstrings(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
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
    words = " ".join(paragraph.split())
    return any(each in words for each in WITHHELD)


def shared_ngrams(corpus: str, text: str, n: int = 13) -> list[str]:
    """Runs of n words that two texts share, in lower case and without punctuation: what training must not have seen."""
    known = set(_ngrams(corpus, n))
    return [gram for gram in dict.fromkeys(_ngrams(text, n)) if gram in known]


def _ngrams(text: str, n: int) -> Iterator[str]:
    words = re.findall(r"\w+", text.lower())
    return (" ".join(words[at : at + n]) for at in range(len(words) - n + 1))
