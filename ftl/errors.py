"""Errors of this layer."""

from __future__ import annotations


class FtlError(Exception):
    """Something the layer above asked for cannot be done; nothing was changed."""


class OutOfSpace(FtlError):
    """Flash or drive DRAM is full."""


class ReadOnly(FtlError):
    """Too few blocks are left that can still be erased: data can be read and freed, not added."""


class UnknownSequence(FtlError):
    """No such sequence handle."""


class UnknownKeyError(FtlError):
    """No value has this key."""


class KeyExistsError(FtlError):
    """A value has this key already."""


class Uncorrectable(FtlError):
    """More bit errors than the ECC corrects, or files that cannot be read (`why`); `handles` are the sequences that
    lost data and now only can be freed."""

    def __init__(self, handles: list[int], what: str = "", why: str = "") -> None:
        what = what or f"sequences {', '.join(map(str, handles))}"
        super().__init__(f"{what}: {why or 'flash data with more errors than the ECC corrects'}")
        self.handles = handles


class MediumFailed(FtlError):
    """The files under the flash cannot be written any more. Unlike after other errors the drive is to be opened anew:
    it is then as its last flush left it."""


class NandRuleError(AssertionError):
    """A rule of NAND was broken: always a defect of this layer."""
