"""Reading of JSON files whose layout is somebody else's: what is wrong is named by file, record and field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """A value of a JSON file and where it stands, such as `dev.json: data[3].title`."""

    value: Any
    where: str

    @classmethod
    def read(cls, path: Path) -> Record:
        """The file's outermost value; raises ValueError for what is no JSON, OSError for what cannot be read."""
        try:
            return cls(json.loads(read_text(path)), f"{path}:")
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: not JSON, or cut off: {error.msg} at line {error.lineno}, column {error.colno}"
            ) from error

    def field(self, name: str) -> Record:
        """A field that must be there."""
        if not isinstance(self.value, dict):
            raise ValueError(f"{self.where} is {_kind(self.value)}, an object with field {name!r} is needed")
        if name not in self.value:
            raise ValueError(f"{self.where} field {name!r} is missing")
        return Record(self.value[name], f"{self.where}{'' if self.where.endswith(':') else '.'}{name}")

    def items(self, minimum: int = 1) -> list[Record]:
        """The elements of a list with at least `minimum` of them."""
        if not isinstance(self.value, list):
            raise ValueError(f"{self.where} is {_kind(self.value)}, a list is needed")
        if len(self.value) < minimum:
            raise ValueError(f"{self.where} has {len(self.value)} elements, at least {minimum} are needed")
        return [Record(each, f"{self.where}[{index}]") for index, each in enumerate(self.value)]

    def text(self) -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise ValueError(f"{self.where} is {_kind(self.value)}, a text is needed")
        return self.value


def read_text(path: Path) -> str:
    """A UTF-8 file's text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "an empty text", type(None): "null"}
    return names.get(type(value), f"{value!r}")
