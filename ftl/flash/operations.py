"""Operations that change a NAND array, as passed to `Nand.log`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from csd_spec.arrays import U8


@dataclass(frozen=True, slots=True)
class Program:
    """Program operation of one page."""

    ppn: int
    page: U8
    spare: Any


@dataclass(frozen=True, slots=True)
class Erase:
    """Erase operation of one block."""

    block: int


Operation = Program | Erase
