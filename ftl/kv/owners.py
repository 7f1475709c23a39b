"""Who wrote which pages: owners, the numbers that stand in tags."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from ftl.errors import OutOfSpace
from ftl.flash.tag import MAX_OWNERS


class Owners:
    """Owners in use, the sequences that share pages of each, and the writes before its first one.

    A page with an owner's tag that was written earlier is of another who had the number before.
    """

    def __init__(self) -> None:
        self.sharers: dict[int, set[int]] = {}  # owner -> handles of sequences with pages of it
        self.first_write: dict[int, int] = {}  # owner -> writes before its first
        self.next = 0

    def new(self, handle: int, writes: int) -> int:
        """A number that no sequence uses; raises OutOfSpace if there is none."""
        if len(self.sharers) >= MAX_OWNERS:
            raise OutOfSpace(f"all {MAX_OWNERS} owner numbers are in use: free sequences")
        owner = next(n % MAX_OWNERS for n in count(self.next) if n % MAX_OWNERS not in self.sharers)
        self.next = owner + 1
        self.sharers[owner] = {handle}
        self.first_write[owner] = writes
        return owner

    def share(self, owners: Iterable[int], handle: int) -> None:
        """A sequence has pages of these owners too."""
        for owner in owners:
            self.sharers[owner].add(handle)

    def leave(self, owners: Iterable[int], handle: int) -> None:
        """A sequence has no pages of these owners any more."""
        for owner in owners:
            self.sharers[owner].discard(handle)
            if not self.sharers[owner]:
                del self.sharers[owner], self.first_write[owner]

    def sequences(self, owners: Iterable[int]) -> set[int]:
        """Handles of all sequences with pages of these owners; numbers that are not in use have none."""
        return set().union(*(self.sharers.get(owner, set()) for owner in owners))

    def restore(self, owner: int, first_write: int, handle: int) -> None:
        """An owner that a record knows."""
        self.sharers.setdefault(owner, set()).add(handle)
        self.first_write[owner] = first_write
