"""Compiled functions that are kept between runs, until anything they are made of changes.

Numba asks for the content of a function's own file alone. Ours call functions, and have constants, of other files: with
those unseen, a machine that has run an older version would go on with parts of it. A module asks for this by having
`njit` from here; functions of others are kept as numba keeps them.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from numba.core import event
from numba.core.caching import InTreeCacheLocator, UserProvidedCacheLocator, UserWideCacheLocator


def njit(*args: Any, **kwargs: Any) -> Any:
    """numba's."""
    return numba.njit(*args, **kwargs)


class _Compilations(event.Listener):
    """Compilations that run now, nested ones included; a function that is loaded from the cache is not one."""

    def __init__(self) -> None:
        self.running = 0

    def on_start(self, event: Any) -> None:
        self.running += 1

    def on_end(self, event: Any) -> None:
        self.running -= 1


_compilations = _Compilations()
event.register("numba:compile", _compilations)


def is_compiling() -> bool:
    """Whether Numba compiles a function now."""
    return _compilations.running > 0


@cache
def _stamp(name: str) -> bytes:
    """A digest of all that a module's functions are made of. It is asked for while the module is made: what comes later
    there is in its file."""
    digest = hashlib.sha256()
    for module in (sys.modules[each] for each in _made_of(name)):
        digest.update(Path(str(module.__file__)).read_bytes())
        for key, value in sorted(vars(module).items()):
            if isinstance(value, np.ndarray):
                digest.update(key.encode() + value.tobytes())
            elif _is_plain(value):
                digest.update(f"{key}={value!r}".encode())
    return digest.digest()


def _is_plain(value: Any) -> bool:
    """Whether a value says by its text what it is."""
    return isinstance(value, bool | int | float | str | np.generic) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )


def _made_of(name: str) -> list[str]:
    """A module and those whose functions it has, of its own package or of who asks for stamps too, and theirs."""
    found, left = set[str](), [name]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            package = each.partition(".")[0]
            left += [other for other in _behind(sys.modules[each]) if other.startswith(f"{package}.") or _asks(other)]
    return sorted(found)


def _behind(module: ModuleType) -> set[str]:
    """Modules that a module has, or functions of."""
    values = [value for value in vars(module).values() if callable(value) or isinstance(value, ModuleType)]
    names = {
        value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
        for value in values
        if not isinstance(value, type)
    }
    return {name for name in names if getattr(sys.modules.get(name), "__file__", None)}


def _asks(name: str) -> bool:
    return getattr(sys.modules.get(name), "njit", None) is njit


class _Stamped:
    """A place for compiled functions that is asked with the module's stamp."""

    def __init__(self, function: Any, path: str) -> None:
        super().__init__(function, path)  # type: ignore[call-arg]  # of the class beside this one
        self._module = function.__module__

    def get_source_stamp(self) -> Any:
        return _stamp(self._module) if _asks(self._module) else super().get_source_stamp()  # type: ignore[misc]


class Provided(_Stamped, UserProvidedCacheLocator):
    """NUMBA_CACHE_DIR, where that is set."""


class InTree(_Stamped, InTreeCacheLocator):
    """Beside the source."""


class UserWide(_Stamped, UserWideCacheLocator):
    """In the user's cache, where the source's folder cannot be written."""


_OURS = [f"{__name__}.{each.__name__}" for each in (Provided, InTree, UserWide)]
numba.config.CACHE_LOCATOR_CLASSES = ",".join([*_OURS, "IPythonCacheLocator", "ZipCacheLocator"])  # in numba's order
