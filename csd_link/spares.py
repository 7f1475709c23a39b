"""Selection of replacement drives for lost ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from threading import Lock

from csd_spec import Drive

More = Callable[[Collection[str]], Drive | None]


def _no_more(names: Collection[str]) -> Drive | None:
    return None


class Spares:
    """Finds a replacement for each group of KV heads that has lost a drive: a `csd_link.replication.Replacement`.

    Candidates, in this order: a spare; a drive that was added since; the lost drive itself, if it is reachable again; a
    drive that stores other groups. Groups that have lost the same drive get the same replacement.
    """

    def __init__(self, drives: Sequence[Drive], spares: Sequence[Drive] = (), more: More = _no_more) -> None:
        """Create the selection.

        Args:
            drives: Drives that store groups.
            spares: Empty drives.
            more: Opens an unused drive; its argument is the names of the used ones.
        """
        self._drives, self._spares, self._more = list(drives), list(spares), more
        self._substitutes: dict[int, Drive] = {}  # by id of the lost drive
        self._lost: list[Drive] = []
        self._added: Counter[int] = Counter()  # groups that a drive has got, by its id
        self._lock = Lock()

    def __call__(self, lost: Drive, in_use: Sequence[Drive]) -> Drive | None:
        """Return a drive to fill in place of a lost one, which is not in use; None if there is none."""
        with self._lock:
            if not _contains(self._lost, lost):
                self._lost.append(lost)
            substitute = self._substitutes.get(id(lost))
            drive = substitute if substitute and self._is_free(substitute, in_use) else self._find(lost, in_use)
            if drive:
                self._substitutes[id(lost)] = drive
                self._added[id(drive)] += 1
            return drive

    def _find(self, lost: Drive, in_use: Sequence[Drive]) -> Drive | None:
        for spare in self._spares:
            if not self._added[id(spare)] and self._is_free(spare, in_use):
                return spare
        names = [drive.name for drive in (*self._drives, *self._spares)]
        for find in (lambda: self._more(names), getattr(lost, "reconnect", None)):
            with suppress(OSError, ValueError):  # no answer: try the next candidate
                if find and (candidate := find()):
                    self._drives.append(candidate)
                    return candidate
        others = [drive for drive in (*self._drives, *self._spares) if self._is_free(drive, in_use)]
        return min(others, key=lambda drive: self._added[id(drive)], default=None)

    def _is_free(self, drive: Drive, in_use: Sequence[Drive]) -> bool:
        return not _contains(self._lost, drive) and not _contains(in_use, drive)


def _contains(drives: Sequence[Drive], drive: Drive) -> bool:
    return any(member is drive for member in drives)
