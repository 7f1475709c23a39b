"""Errors of this layer."""

from __future__ import annotations


class FtlError(Exception):
    """The command cannot be carried out; nothing was changed."""


class OutOfSpaceError(FtlError):
    """Flash or drive DRAM is full."""


class ReadOnlyError(FtlError):
    """Too few good blocks are left: data can be read and freed, but not added."""


class UnknownSequenceError(FtlError):
    """No such sequence handle."""


class UnknownKeyError(FtlError):
    """No value is stored under this key."""


class KeyExistsError(FtlError):
    """A value is already stored under this key."""


class UncorrectableReadError(FtlError):
    """More bit errors than the ECC corrects, or unreadable files (`why`).

    Attributes:
        handles: Sequences that lost data; they can only be freed.
    """

    def __init__(self, handles: list[int], what: str = "", why: str = "") -> None:
        what = what or f"sequences {', '.join(map(str, handles))}"
        super().__init__(f"{what}: {why or 'flash data with more errors than the ECC corrects'}")
        self.handles = handles


class MediaFailedError(FtlError):
    """The backing files can no longer be written. The drive must be opened again; it then holds its last flush."""


class NandRuleError(AssertionError):
    """A NAND programming rule was violated: always a bug in the FTL."""
