"""Packages that only some commands need: extras of the project."""

from __future__ import annotations

import sys
from importlib.util import find_spec


class MissingExtraError(ValueError):
    """A package is not installed; the text has the line that installs it."""

    def __init__(self, use: str, package: str, extra: str) -> None:
        super().__init__(f"{use} needs the package {package}: pip install 'vcsd[{extra}]'")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    if package in sys.modules:  # of which find_spec() refuses those that stand in for a package
        return sys.modules[package] is not None
    return find_spec(package) is not None


def require(use: str, extra: str, *packages: str) -> None:
    """Raise MissingExtraError for the first package that is not installed, before any work is done.

    Args:
        use: What needs it, for the error: an option or a command.
        extra: Extra of the project that has the packages.
        packages: Names by which they are imported.
    """
    for package in packages:
        if not is_installed(package):
            raise MissingExtraError(use, package, extra)
