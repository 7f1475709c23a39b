"""Documents in YAML, as checked values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from csd_spec.checked import from_values

T = TypeVar("T")
MAX_BYTES = 1 << 18


def read_yaml(path: Path, kind: type[T]) -> T:
    """The value that a YAML file describes; raises ValueError naming the file and the field that is off."""
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
    """Knows no aliases, by which a short text can stand for a huge one, and takes a key once."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias: write out what it stands for", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        found = super().construct_mapping(node, deep)
        if len(found) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return found
