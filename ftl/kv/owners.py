"""Owner numbers: the part of a page's tag that identifies the writing sequence."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from ftl.errors import OutOfSpaceError
from ftl.flash.tag import MAX_OWNERS


class Owners:
    """Owner numbers in use, the sequences that share pages of each, and the write count when each was assigned.

    A page with an owner's tag and an older write number belongs to an earlier user of the number.
    """

    def __init__(self) -> None:
        self.sharers: dict[int, set[int]] = {}  # owner -> handles of sequences with pages of it
        self.first_write: dict[int, int] = {}  # owner -> write count when it was assigned
        self.next = 0

    def new(self, handle: int, writes: int) -> int:
        """Assign an unused number; raises OutOfSpaceError if there is none."""
        if len(self.sharers) >= MAX_OWNERS:
            raise OutOfSpaceError(f"all {MAX_OWNERS} owner numbers are in use: free sequences")
        owner = next(n % MAX_OWNERS for n in count(self.next) if n % MAX_OWNERS not in self.sharers)
        self.next = owner + 1
        self.sharers[owner] = {handle}
        self.first_write[owner] = writes
        return owner

    def share(self, owners: Iterable[int], handle: int) -> None:
        """Add a sequence to the sharers of these owners."""
        for owner in owners:
            self.sharers[owner].add(handle)

    def release(self, owners: Iterable[int], handle: int) -> None:
        """Remove a sequence from the sharers of these owners; unused owners are freed."""
        for owner in owners:
            assert handle in self.sharers[owner], f"sequence {handle} has no pages of owner {owner}"
            self.sharers[owner].discard(handle)
            if not self.sharers[owner]:
                del self.sharers[owner], self.first_write[owner]

    def sequences(self, owners: Iterable[int]) -> set[int]:
        """Handles of all sequences with pages of these owners; unused numbers have none."""
        return set().union(*(self.sharers.get(owner, set()) for owner in owners))

    def restore(self, owner: int, first_write: int, handle: int) -> None:
        """Restore an owner from a journal record."""
        self.sharers.setdefault(owner, set()).add(handle)
        self.first_write[owner] = first_write
