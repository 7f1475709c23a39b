"""Loads YAML documents as validated values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from csd_spec.checked import from_values

T = TypeVar("T")
MAX_BYTES = 1 << 18


def read_yaml(path: Path, kind: type[T]) -> T:
    """Load a value from YAML; raises ValueError with the file and the invalid field."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes: not a description")
        return from_values(yaml.load(text, _Loader), kind)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, and aliases, with which a short text can expand to a huge value."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported: write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        found = super().construct_mapping(node, deep)
        if len(found) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return found
