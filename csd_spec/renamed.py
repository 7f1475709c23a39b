"""Old names of the public Python API: they work, with a DeprecationWarning, until release `REMOVED_IN`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

REMOVED_IN = "0.3.0"

T = TypeVar("T")


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds names of the module under their old names.

    Args:
        module: `__name__` of the module.
        names: New names by old ones.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return find


def old_fields(**names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: the constructor accepts old names of fields, and attributes have them.

    Args:
        names: New names by old ones.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__

        @wraps(init)
        def accept_old(self: Any, *args: Any, **given: Any) -> None:
            if not names.keys().isdisjoint(given):
                given = new_arguments(cls.__name__, given, names)
            init(self, *args, **given)

        def find(self: Any, name: str) -> Any:
            if name not in names:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
            warn_renamed(f"{cls.__name__}.{name}", names[name])
            return getattr(self, names[name])

        cls.__init__ = accept_old  # type: ignore[method-assign]
        cls.__getattr__ = find  # type: ignore[attr-defined]
        return cls

    return decorate


def new_arguments(function: str, given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments under their new names.

    Args:
        function: Name of the function, for messages.
        given: Keyword arguments.
        names: New names by old ones.

    Raises:
        TypeError: An argument is given under both names.
    """
    found = {name: value for name, value in given.items() if name not in names}
    for name, value in given.items():
        if name in names:
            if names[name] in found:
                raise TypeError(f"{function}(): {name} is the old name of {names[name]}: give {names[name]} alone")
            warn_renamed(f"{function}({name}=)", f"{names[name]}=", stacklevel=4)
            found[names[name]] = value
    return found


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn about an old name. `stacklevel`: frames up to the code that uses it, this function included."""
    text = f"{old} is now {new}; the old name ends with release {REMOVED_IN}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
