"""YAML documents: read as validated values, and written. Nothing else in the packages reads or writes YAML.

Scalars are those of YAML 1.2 (core schema). PyYAML follows 1.1, in which `1e9` is a string, `012` is 10, `1:30` is 90
and `off` is false.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import yaml

from csd_spec.checked import from_values

T = TypeVar("T")
MAX_BYTES = 1 << 18

_TAG = "tag:yaml.org,2002:"
_SCALARS = (  # tag, form, first characters
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


def read_yaml(path: Path, kind: type[T]) -> T:
    """Load a value from YAML; raises ValueError with the file and the invalid field."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes: not a description")
        return from_values(load_yaml(text), kind)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def load_yaml(text: str | bytes) -> Any:
    """Values of a YAML document, or of JSON; raises ValueError or yaml.YAMLError."""
    return yaml.load(text, _Loader)


def dump_yaml(values: Any, sort_keys: bool = True) -> str:
    """A YAML document that `load_yaml` reads as these values."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=sort_keys))


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, and aliases, with which a short text can expand to a huge value."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (filled below, as in the base class)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported: write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = set[Any]()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else id(key)
            if name in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r}: a key is given twice", key.start_mark)
            keys.add(name)
        return super().construct_mapping(node, deep)

    def number(self, node: Any) -> int | float:
        """A number. A whole one with an exponent is an integer: fields such as `clock_hz: 285e6` need one."""
        text = str(self.construct_scalar(node)).lower()
        if re.fullmatch(r"[-+]?[0-9]+", text):
            return int(text)
        if text[:2] in ("0x", "0o"):
            return int(text, 0)
        value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
        return int(value) if "e" in text and value.is_integer() and abs(value) < 1 << 63 else value


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as other values."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (filled below, as in the base class)


for _tag, _form, _first in _SCALARS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_form})$"), _first)
_Loader.add_constructor(f"{_TAG}int", _Loader.number)
_Loader.add_constructor(f"{_TAG}float", _Loader.number)
