"""Packages that only some commands need: extras of the project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class MissingExtraError(ValueError):
    """A package is not installed; the text has the line that installs it."""

    def __init__(self, use: str, package: str, extra: str) -> None:
        super().__init__(f"{use} needs the package {package}: pip install 'vcsd[{extra}]'")


def require(use: str, extra: str, *packages: str) -> None:
    """Raise MissingExtraError for the first package that is not installed, before any work is done.

    Args:
        use: What needs it, for the error: an option or a command.
        extra: Extra of the project that has the packages.
        packages: Names by which they are imported.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(use, package, extra)


@contextmanager
def importing(use: str, extra: str) -> Iterator[None]:
    """Import packages of an extra; raises MissingExtraError where one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(use, str(error.name), extra) from error
