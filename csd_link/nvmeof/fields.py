"""Fields of commands that the identify data declares unsupported: a command that sets one is refused.

Reserved fields are ignored, as the specification allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from csd_link.nvmeof.commands import Admin, Code, CommandError, Csi, Sqe
from csd_link.nvmeof.nvm import Nvm

ADMIN = -1  # in place of a command set
_SGL = 1  # PSDT: an SGL, the only kind of data pointer over fabrics
_WITH_BLOCKS = (Nvm.READ, Nvm.WRITE, Nvm.COMPARE, Nvm.WRITE_ZEROES, Nvm.VERIFY)
_WITH_UUID = (Admin.IDENTIFY, Admin.GET_LOG_PAGE, Admin.GET_FEATURES, Admin.SET_FEATURES)
_WRITES = (Nvm.WRITE, Nvm.WRITE_ZEROES)


class Field(NamedTuple):
    """A field that must be zero.

    Attributes:
        name: Its name in the specification.
        declared: What declares it unsupported.
        word: Name in `Sqe`.
        mask: Its bits.
        opcodes: Commands that have it.
    """

    name: str
    declared: str
    word: str
    mask: int
    opcodes: tuple[int, ...]


UNSUPPORTED: dict[int, tuple[Field, ...]] = {
    Csi.NVM: (
        Field("PRINFO", "DPC: no protection information", "cdw12", 0xF << 26, _WITH_BLOCKS),
        Field("STC", "DPC: no protection information", "cdw12", 1 << 24, _WITH_BLOCKS),
        Field("EILBRT", "DPC: no protection information", "cdw14", 0xFFFFFFFF, _WITH_BLOCKS),
        Field("ELBAT, ELBATM", "DPC: no protection information", "cdw15", 0xFFFFFFFF, _WITH_BLOCKS),
        Field("MPTR", "MC: no metadata", "metadata", (1 << 64) - 1, _WITH_BLOCKS),
        Field("DTYPE", "OACS bit 5: no directives", "cdw12", 0xF << 20, _WRITES),
        Field("DSPEC", "OACS bit 5: no directives", "cdw13", 0xFFFF << 16, _WRITES),
    ),
    ADMIN: (
        Field("UUID Index", "CTRATT bit 9: no UUID list", "cdw14", 0x7F, _WITH_UUID),
        Field("CNS Specific Identifier", "no CNS has one", "cdw11", 0xFFFF, (Admin.IDENTIFY,)),
        Field("CNTID", "no CNS has one", "cdw10", 0xFFFF << 16, (Admin.IDENTIFY,)),
        Field("LSP", "no log page has one", "cdw10", 0x7F << 8, (Admin.GET_LOG_PAGE,)),
        Field("LSI", "no log page has one", "cdw11", 0xFFFF << 16, (Admin.GET_LOG_PAGE,)),
        Field("OT", "log pages have no index offsets", "cdw14", 1 << 23, (Admin.GET_LOG_PAGE,)),
    ),
}


def _by_opcode(fields: Iterable[Field]) -> dict[int, list[tuple[int, int]]]:
    """Places in `Sqe` and masks, by opcode."""
    places: dict[int, list[tuple[int, int]]] = {}
    for field in fields:
        for opcode in field.opcodes:
            places.setdefault(opcode, []).append((Sqe._fields.index(field.word), field.mask))
    return places


_PLACES = {kind: _by_opcode(fields) for kind, fields in UNSUPPORTED.items()}


def check_fields(sqe: Sqe, kind: int) -> None:
    """Raise CommandError if a command sets an unsupported field.

    Args:
        kind: Its command set, or ADMIN.
    """
    if sqe.flags & 3 or sqe.flags >> 6 != _SGL:  # FUSES: no fused commands
        raise CommandError(Code.INVALID_FIELD)
    for at, mask in _PLACES.get(kind, {}).get(sqe.opcode, ()):
        if sqe[at] & mask:
            raise CommandError(Code.INVALID_FIELD)
