"""Compiled functions that are kept between runs, until anything they are made of changes.

Numba asks for the content of a function's own file alone. Ours call functions, and have constants, of other files: with
those unseen, a machine that has run an older version would go on with parts of it.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numba import config, njit
from numba.core.caching import InTreeCacheLocator, UserProvidedCacheLocator, UserWideCacheLocator

__all__ = ["njit"]

_THEIRS = {"numba", "llvmlite", "numpy", *sys.stdlib_module_names}  # numba knows of its own version by itself
_CONSTANTS = (bool, int, float, str, tuple, np.generic)


@cache
def _stamp(name: str) -> bytes:
    """A digest of a module's file, of constants that it has from others, and of the modules of functions that it has
    from others. It is asked for while a module is made: what comes later there is in its file."""
    module, digest = sys.modules[name], hashlib.sha256()
    digest.update(Path(str(module.__file__)).read_bytes())
    constants = {key: value for key, value in vars(module).items() if isinstance(value, _CONSTANTS) and key[:2] != "__"}
    digest.update(repr(sorted(constants.items())).encode())
    for other in sorted(_behind(module) - {name}):
        digest.update(_stamp(other))
    return digest.digest()


def _behind(module: ModuleType) -> set[str]:
    """Modules of the functions that a module knows, but for those of others' packages."""
    functions = [value for value in vars(module).values() if callable(value) and not isinstance(value, type)]
    found = {str(getattr(value, "__module__", "")) for value in functions}
    known = {name for name in found if name.partition(".")[0] not in _THEIRS}
    return {name for name in known if getattr(sys.modules.get(name), "__file__", None)}


class _Stamped:
    """A place for compiled functions that is asked with the module's stamp."""

    def __init__(self, function: Any, path: str) -> None:
        super().__init__(function, path)  # type: ignore[call-arg]  # of the class beside this one
        self._module = function.__module__

    def get_source_stamp(self) -> Any:
        if getattr(sys.modules.get(self._module), "__file__", None):
            return _stamp(self._module)
        return super().get_source_stamp()  # type: ignore[misc]  # of a file that was run, and never imported


class Provided(_Stamped, UserProvidedCacheLocator):
    """NUMBA_CACHE_DIR, where that is set."""


class InTree(_Stamped, InTreeCacheLocator):
    """Beside the source."""


class UserWide(_Stamped, UserWideCacheLocator):
    """In the user's cache, where the source's folder cannot be written."""


_OURS = [f"{__name__}.{each.__name__}" for each in (Provided, InTree, UserWide)]
config.CACHE_LOCATOR_CLASSES = ",".join([*_OURS, "IPythonCacheLocator", "ZipCacheLocator"])  # numba's, in its order
