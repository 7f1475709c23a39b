"""Errors of this layer."""

from __future__ import annotations


class FtlError(Exception):
    """Something the layer above asked for cannot be done; nothing was changed."""


class OutOfSpace(FtlError):
    """Flash or drive DRAM is full."""


class UnknownSequence(FtlError):
    """No such sequence handle."""


class NandRuleError(AssertionError):
    """A rule of NAND was broken: always a defect of this layer."""
