"""Texts to record attention on: files, or published ones by name."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_spec.checked import from_json
from vcsd.options import check_text
from vcsd_eval.accuracy.data import NAMES, VARIABLE, find
from vcsd_eval.accuracy.recorded import TEXT

CODE_CHARS = 400_000  # of the library's files


def _squad(file: Path) -> str:
    """Paragraphs of all articles, each once."""
    articles: Any = from_json(file.read_text(encoding="utf-8"), dict[str, Any])["data"]
    return "\n\n".join(part["context"] for article in articles for part in article["paragraphs"])


def _sharegpt(file: Path) -> str:
    """Dialogues in sequence, one line `speaker: utterance` per turn."""
    dialogues: Any = from_json(file.read_text(encoding="utf-8"), list[dict[str, Any]])
    turns = (turn for dialogue in dialogues for turn in dialogue["conversations"])
    return "\n\n".join(f"{turn['from']}: {turn['value']}" for turn in turns)


_READ: dict[str, Callable[[Path], str]] = {
    "wikitext": lambda file: file.read_text(encoding="utf-8"),
    "shakespeare": lambda file: file.read_text(encoding="utf-8"),
    "squad": _squad,
    "sharegpt": _sharegpt,
}


def standard_library() -> str:
    """Modules of the running Python's standard library in alphabetical order, until they have CODE_CHARS."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    result, size = [], 0
    for file in sorted(folder.glob("*.py")):
        result.append(file.read_text(encoding="utf-8"))
        size += len(result[-1])
        if size >= CODE_CHARS:
            break
    return "\n".join(result)


def read(text: Path | None) -> str:
    """The text of a file or of a name; None is the shipped one.

    Raises:
        OSError: There is no such file.
        ValueError: The file is not text, or the data file of a name is missing or has another layout.
    """
    name = str(text)
    if text is None or text.exists() or name not in ("code", *_READ):
        check_text(text)
        return (text or TEXT).read_text(encoding="utf-8")
    if name == "code":
        return standard_library()
    file = find(name)
    if file is None:
        raise ValueError(f"text {name}: set {VARIABLE} to a folder that has {' or '.join(NAMES[name])}")
    try:
        return _READ[name](file)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not in the layout of {name}: {error}") from error


def check(text: Path | None) -> Path | None:
    """Raise OSError or ValueError for a text that cannot be read, before any long computation."""
    if text is not None:
        read(text)
    return text


_HELP = f"text to record q, k and v on: a file, or code, {', '.join(_READ)} (default: from Coriolanus)"
SourceText = Annotated[Path | None, typer.Option(help=_HELP, callback=check)]
SourceTexts = Annotated[list[Path] | None, typer.Option("--text", help=f"{_HELP}; repeatable")]
