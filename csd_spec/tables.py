"""Tables from names to functions, with what users add: a Python file, or plug-ins that are installed."""

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
    """Our functions of one kind, and where others come from.

    name: of the global in a user's file that is its table, which may be ours with its own added. group: of entry
    points. check: (source, name, function), raises ValueError for one that is none. doc: the page that says more.
    """

    ours: dict[str, F]
    name: str
    group: str
    check: Callable[[str, object, Any], F]
    doc: str

    def load(self, file: Path | None = None) -> dict[str, F]:
        """Ours, those that are installed as plug-ins, and those of a file, which is run once.

        Ours itself stays as it is. Raises ValueError with the reason for a file or plug-in that fails.
        """
        found = self.ours | self.plugged_in()
        if file is None:
            return found
        try:
            changed_ns = file.stat().st_mtime_ns
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from None
        return found | self._of_file(file, changed_ns)

    @cache  # noqa: B019  # there are as many tables as kinds of functions
    def plugged_in(self) -> dict[str, F]:
        """Functions of installed packages."""
        found = {}
        for entry in entry_points(group=self.group):
            try:
                found[entry.name] = self.check(f"plug-in {entry.value}", entry.name, entry.load())
            except Exception as error:  # whatever somebody's package raises
                raise ValueError(f"plug-in {entry.value}: {type(error).__name__}: {error}") from error
        return found

    @cache  # noqa: B019
    def _of_file(self, file: Path, changed_ns: int) -> dict[str, F]:
        """The functions of a file as it was when it was changed last."""
        before, namespace = dict(self.ours), dict[str, Any](__name__=f"vcsd_{self.name.lower()}", __file__=str(file))
        try:
            exec(compile(file.read_bytes(), str(file), "exec"), namespace)
        except Exception as error:  # whatever the user's file raises
            raise ValueError(f"{file}: {type(error).__name__}: {error}") from error
        else:
            found = namespace.get(self.name)
            table = dict(found) if isinstance(found, Mapping) else None
        finally:
            self.ours.clear()
            self.ours.update(before)
        if table is None:
            raise ValueError(f"{file}: has no {self.name}, a table from name to function ({self.doc})")
        namespace[self.name] = table
        return {name: self.check(str(file), name, each) for name, each in table.items()}
