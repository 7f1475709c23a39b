"""Numba cache that is invalidated when any imported source or constant changes.

Numba checks only the file of the function itself. Our kernels call functions and use constants of other modules, so a
stale cache would keep running old code. A module opts in by importing `njit` from here; functions of other modules are
cached as usual.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from numba.core import event
from numba.core.caching import InTreeCacheLocator, UserProvidedCacheLocator, UserWideCacheLocator


def njit(*args: Any, **kwargs: Any) -> Any:
    """`numba.njit`."""
    return numba.njit(*args, **kwargs)


class _Compilations(event.Listener):
    """Counts running compilations, nested ones included; loading a function from the cache does not count."""

    def __init__(self) -> None:
        self.running = 0

    def on_start(self, event: Any) -> None:
        self.running += 1

    def on_end(self, event: Any) -> None:
        self.running -= 1


_compilations = _Compilations()
event.register("numba:compile", _compilations)


def is_compiling() -> bool:
    """Whether Numba is compiling a function."""
    return _compilations.running > 0


@cache
def _stamp(name: str) -> bytes:
    """Digest of everything that a module's functions depend on.

    It is computed while the module is being imported; definitions that follow are covered by the digest of its file.
    """
    digest = hashlib.sha256()
    for module in (sys.modules[source] for source in _sources_of(name)):
        digest.update(Path(str(module.__file__)).read_bytes())
        for key, value in sorted(vars(module).items()):
            if isinstance(value, np.ndarray):
                digest.update(key.encode() + value.tobytes())
            elif _is_plain(value):
                digest.update(f"{key}={value!r}".encode())
    return digest.digest()


def _is_plain(value: Any) -> bool:
    """Whether the repr of a value identifies it."""
    return isinstance(value, bool | int | float | str | np.generic) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )


def _sources_of(name: str) -> list[str]:
    """List a module and the modules whose functions it uses, recursively: its own package, and others that opt in."""
    modules, left = set[str](), [name]
    while left:
        module = left.pop()
        if module not in modules:
            modules.add(module)
            package = module.partition(".")[0]
            left += [
                other
                for other in _dependencies(sys.modules[module])
                if other.startswith(f"{package}.") or _uses_stamps(other)
            ]
    return sorted(modules)


def _dependencies(module: ModuleType) -> set[str]:
    """Modules that a module imports, or imports functions or tuple classes of."""
    values = [value for value in vars(module).values() if callable(value) or isinstance(value, ModuleType)]
    names = {
        value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
        for value in values
        if not isinstance(value, type) or issubclass(value, tuple)  # the order of a tuple's fields is compiled
    }
    return {name for name in names if getattr(sys.modules.get(name), "__file__", None)}


@cache
def _tuple_types(name: str) -> str:
    """Names of the tuple classes that a module and those whose functions it uses have."""
    every = [value for each in _sources_of(name) for value in vars(sys.modules[each]).values()]
    classes = [value for value in every if isinstance(value, type) and issubclass(value, tuple)]
    return " ".join(sorted({f"{each.__module__}.{each.__name__}" for each in classes}))


def _uses_stamps(name: str) -> bool:
    return getattr(sys.modules.get(name), "njit", None) is njit


class _StampedCacheLocator:
    """Cache locator that uses the stamp of the function's module."""

    def __init__(self, function: Any, path: str) -> None:
        super().__init__(function, path)  # type: ignore[call-arg]  # of the class beside this one
        self._module = function.__module__

    def get_disambiguator(self) -> str:
        """Part of the index's file name: an index whose pickled tuple types have other names cannot be read."""
        own: str = super().get_disambiguator()  # type: ignore[misc]
        types = _tuple_types(self._module) if _uses_stamps(self._module) else ""
        return f"{own}-{zlib.crc32(types.encode()):08x}" if types else own

    def get_source_stamp(self) -> Any:
        return _stamp(self._module) if _uses_stamps(self._module) else super().get_source_stamp()  # type: ignore[misc]


class EnvironmentCacheLocator(_StampedCacheLocator, UserProvidedCacheLocator):
    """Cache in NUMBA_CACHE_DIR, if it is set."""


class SourceTreeCacheLocator(_StampedCacheLocator, InTreeCacheLocator):
    """Cache next to the source."""


class UserCacheLocator(_StampedCacheLocator, UserWideCacheLocator):
    """Cache in the user's cache folder if the source folder is read-only."""


_OURS = [f"{__name__}.{each.__name__}" for each in (EnvironmentCacheLocator, SourceTreeCacheLocator, UserCacheLocator)]
numba.config.CACHE_LOCATOR_CLASSES = ",".join([*_OURS, "IPythonCacheLocator", "ZipCacheLocator"])  # in numba's order
