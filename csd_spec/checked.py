"""Validated values: types and ranges are checked on construction, and unknown fields are rejected.

`frozen_value` declares a class of such values, `from_json` reads one. Errors are one line and name the field.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable
from dataclasses import fields
from functools import cache, wraps
from numbers import Integral
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.errors import PydanticInvalidForJsonSchema

T = TypeVar("T")
Count = Annotated[int, Field(ge=1, le=1 << 31)]

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
_FOREIGN = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _plain_integer(value: Any) -> Any:
    """NumPy's integers are taken as Python's."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


Whole = Annotated[int, BeforeValidator(_plain_integer)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen_value(kind: type[T]) -> type[T]:
    """Class decorator: a frozen, keyword-only dataclass with slots whose fields are validated.

    The constructor raises ValueError with the name of an invalid field.
    """
    return _validated(kind, slots=True)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen_part(kind: type[T]) -> type[T]:
    """Like `frozen_value`, for one of several base classes of such a value, of which only one may have slots."""
    return _validated(kind, slots=False)


def _validated(kind: type[T], slots: bool) -> type[T]:
    validated: Any = dataclass(frozen=True, slots=slots, kw_only=True, config=_STRICT)(kind)
    validated.__init__ = _with_short_errors(validated.__init__, validated)
    return validated  # type: ignore[no-any-return]  # mypy does not see that this is still the class


@dataclass_transform(frozen_default=True, kw_only_default=True)
def lenient_value(kind: type[T]) -> type[T]:
    """Like `frozen_value`, for data in third-party formats: unknown fields are ignored."""
    return dataclass(frozen=True, slots=True, kw_only=True, config=_FOREIGN)(kind)  # type: ignore[return-value]


def _with_short_errors(init: Callable[..., None], kind: type) -> Callable[..., None]:
    @wraps(init)
    def checked(*args: Any, **values: Any) -> None:
        try:
            init(*args, **values)
        except ValidationError as error:
            raise ValueError(format_error(error, kind)) from None

    return checked


def from_json(text: str | bytes, kind: type[T]) -> T:
    """Read a value from JSON; raises ValueError with the name of an invalid field."""
    try:
        return adapter(kind).validate_json(text)  # type: ignore[no-any-return, arg-type]  # adapter is untyped
    except ValidationError as error:
        raise ValueError(format_error(error, kind)) from None


def from_values(values: object, kind: type[T]) -> T:
    """Read a value from dicts, lists, strings and numbers, as in YAML or from `dataclasses.asdict`."""
    try:
        return from_json(json.dumps(values, default=str), kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the pydantic adapter of a class: reads values, and has their JSON schema."""
    return TypeAdapter(kind)


def format_error(error: ValidationError, kind: Any) -> str:
    """Format the first error in one line; unknown fields come before missing ones."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda entry: entry["type"] not in _UNKNOWN)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    lead = f"{where}: " if where else ""
    if first["type"] in _UNKNOWN:
        return f"{lead}no such field{_suggest_field(str(first['loc'][-1]), kind)}"
    if first["type"] == "missing":
        return f"{lead}is missing"
    if first["type"] == "json_invalid":
        return f"not JSON, or cut off: {first['ctx']['error']}"
    if first["type"] == "value_error":
        return f"{lead}{first['ctx']['error']}"
    got = "a string" if isinstance(first["input"], str) else type(first["input"]).__name__
    return f"{lead}{first['msg'].replace('Input should be', 'must be')}, got {reprlib.repr(first['input'])} ({got})"


def _suggest_field(name: str, kind: Any) -> str:
    """Suggest a known field for an unknown one."""
    near = difflib.get_close_matches(name, _names(kind) - {name}, 1, 0.5)
    return f": did you mean {near[0]}?" if near else ""


def _names(kind: Any) -> set[str]:
    """Fields of a class and of the classes nested in it."""
    try:
        schema = adapter(kind).json_schema()
    except PydanticInvalidForJsonSchema:  # a field of a class that is not pydantic's
        return {field.name for field in fields(kind)}
    parts = [schema, *schema.get("$defs", {}).values()]
    return {name for part in parts for name in part.get("properties", {})}
