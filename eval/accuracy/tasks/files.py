"""Published data files; an error names the file, the record and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator

from csd_spec.checked import from_json

T = TypeVar("T")


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is an empty text")
    return text


Text = Annotated[str, AfterValidator(_not_empty)]


def read_json(path: Path, kind: type[T]) -> T:
    """Value in a JSON file; raises ValueError for an invalid value, OSError for an unreadable file."""
    text = read_text(path)
    try:
        return from_json(text, kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_text(path: Path) -> str:
    """A UTF-8 file's text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
