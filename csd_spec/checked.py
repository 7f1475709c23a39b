"""Values that are checked when they are made, by a caller as from a document: types, ranges, and no field too many.

`value` makes a class of such values, `from_json` reads one. What is off is one line that names the field.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

T = TypeVar("T")
Count = Annotated[int, Field(ge=1, le=1 << 31)]

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_FOREIGN = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def value(kind: type[T]) -> type[T]:
    """A frozen dataclass with slots and keywords only, whose fields must be of their types, within their ranges.

    Raises ValueError, where it is made, naming the field.
    """
    made: Any = dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)(kind)
    made.__init__ = _in_one_line(made.__init__, made)
    return made  # type: ignore[no-any-return]  # still the class, as far as types go


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(kind: type[T]) -> type[T]:
    """The same of somebody else's layout: fields that are not known are passed over."""
    return dataclass(frozen=True, slots=True, kw_only=True, config=_FOREIGN)(kind)  # type: ignore[return-value]  # as above


def _in_one_line(init: Callable[..., None], made: type) -> Callable[..., None]:
    @wraps(init)
    def checked(*args: Any, **given: Any) -> None:
        try:
            init(*args, **given)
        except ValidationError as error:
            raise ValueError(says(error, made)) from None

    return checked


def from_json(text: str | bytes, kind: type[T]) -> T:
    """The value that a JSON text describes; raises ValueError naming the field that is off."""
    try:
        return adapter(kind).validate_json(text)  # type: ignore[no-any-return, arg-type]  # a T, which an adapter of any kind cannot say
    except ValidationError as error:
        raise ValueError(says(error, kind)) from None


def from_values(values: object, kind: type[T]) -> T:
    """The same of dictionaries, lists, texts and numbers, as YAML gives them or `dataclasses.asdict`."""
    try:
        return from_json(json.dumps(values, default=str), kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What reads values of a kind, and knows their JSON schema."""
    return TypeAdapter(kind)


def says(error: ValidationError, kind: Any) -> str:
    """The first thing that is off, in one line; a field that is not known before one that is missing."""
    found = error.errors(include_url=False)
    first = min(found, key=lambda each: each["type"] not in _UNKNOWN)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    lead = f"{where}: " if where else ""
    if first["type"] in _UNKNOWN:
        return f"{lead}no such field{_near(str(first['loc'][-1]), kind)}"
    if first["type"] == "missing":
        return f"{lead}is missing"
    if first["type"] == "json_invalid":
        return f"not JSON, or cut off: {first['ctx']['error']}"
    if first["type"] == "value_error":
        return f"{lead}{first['ctx']['error']}"
    got = "a text" if isinstance(first["input"], str) else type(first["input"]).__name__
    return f"{lead}{first['msg'].replace('Input should be', 'must be')}, got {reprlib.repr(first['input'])} ({got})"


def _near(name: str, kind: Any) -> str:
    """What a field that is not known was meant to be."""
    near = difflib.get_close_matches(name, _names(kind) - {name}, 1, 0.5)
    return f": did you mean {near[0]}?" if near else ""


def _names(kind: Any) -> set[str]:
    """Fields of a class of values, and of those in it."""
    schema = adapter(kind).json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return {name for part in parts for name in part.get("properties", {})}
