"""Registries that users can extend with a Python file or with installed plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

F = TypeVar("F")


@dataclass(frozen=True, eq=False)
class Tables(Generic[F]):
    """Built-in objects of one kind by name, and the sources of user-defined ones.

    Attributes:
        ours: Built-in objects.
        name: Global variable of a user's file that holds its table; it may be the built-in table plus entries.
        group: Entry point group of plug-ins.
        check: Called with (source, name, object); raises ValueError if the object is invalid.
        doc: Page with the documentation.
    """

    ours: dict[str, F]
    name: str
    group: str
    check: Callable[[str, object, Any], F]
    doc: str

    def load(self, file: Path | None = None) -> dict[str, F]:
        """Return the built-in objects, those of installed plug-ins, and those of a file, which is executed once.

        The built-in table is not changed.

        Raises:
            ValueError: A file or plug-in fails.
        """
        table = self.ours | self.plugged_in()
        if file is None:
            return table
        try:
            changed_ns = file.stat().st_mtime_ns
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from None
        return table | self._of_file(file, changed_ns)

    @cache  # noqa: B019  # there are as many tables as kinds of functions
    def plugged_in(self) -> dict[str, F]:
        """Objects of installed packages."""
        table = {}
        for entry in entry_points(group=self.group):
            try:
                table[entry.name] = self.check(f"plug-in {entry.value}", entry.name, entry.load())
            except Exception as error:  # a third-party package may raise anything
                raise ValueError(f"plug-in {entry.value}: {type(error).__name__}: {error}") from error
        return table

    @cache  # noqa: B019
    def _of_file(self, file: Path, changed_ns: int) -> dict[str, F]:
        """Objects of a file as of its last change."""
        before, namespace = dict(self.ours), dict[str, Any](__name__=f"vcsd_{self.name.lower()}", __file__=str(file))
        try:
            exec(compile(file.read_bytes(), str(file), "exec"), namespace)
        except Exception as error:  # a user's file may raise anything
            raise ValueError(f"{file}: {type(error).__name__}: {error}") from error
        else:
            content = namespace.get(self.name)
            table = dict(content) if isinstance(content, Mapping) else None
        finally:
            self.ours.clear()
            self.ours.update(before)
        if table is None:
            raise ValueError(f"{file}: has no {self.name}, a table by name ({self.doc})")
        namespace[self.name] = table
        return {name: self.check(str(file), name, entry) for name, entry in table.items()}
