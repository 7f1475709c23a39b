"""Every field that is declared unsupported is an Invalid Field when a command sets it.

partner of: csd_link/nvmeof/fields.py
"""

import re

import pytest

from csd_link.nvmeof.commands import DO_NOT_RETRY, Admin, Code, Csi, Sqe
from csd_link.nvmeof.fields import ADMIN, UNSUPPORTED
from csd_link.nvmeof.nvm import Nvm
from tests.nvmeof import DOCS, MemoryBlocks, raw_queues, subsystem_of, target_of

INVALID = Code.INVALID_FIELD | DO_NOT_RETRY
VALID = {  # a command of each opcode that succeeds, and the bytes of its data
    (Csi.NVM, Nvm.READ): (Sqe(Nvm.READ, nsid=1), 4096),
    (Csi.NVM, Nvm.WRITE): (Sqe(Nvm.WRITE, nsid=1), 4096),
    (Csi.NVM, Nvm.COMPARE): (Sqe(Nvm.COMPARE, nsid=1), 4096),
    (Csi.NVM, Nvm.WRITE_ZEROES): (Sqe(Nvm.WRITE_ZEROES, nsid=1), 0),
    (Csi.NVM, Nvm.VERIFY): (Sqe(Nvm.VERIFY, nsid=1), 0),
    (ADMIN, Admin.IDENTIFY): (Sqe(Admin.IDENTIFY, cdw10=1), 4096),
    (ADMIN, Admin.GET_LOG_PAGE): (Sqe(Admin.GET_LOG_PAGE, cdw10=2 | 127 << 16), 512),
    (ADMIN, Admin.GET_FEATURES): (Sqe(Admin.GET_FEATURES, cdw10=7), 0),
    (ADMIN, Admin.SET_FEATURES): (Sqe(Admin.SET_FEATURES, cdw10=7), 0),
}
FIELDS = [(kind, opcode, field) for kind, fields in UNSUPPORTED.items() for field in fields for opcode in field.opcodes]


@pytest.fixture(scope="module")
def queues():
    with target_of(subsystem_of(MemoryBlocks())) as target, raw_queues(target) as (admin, io):
        yield {ADMIN: admin, Csi.NVM: io}


def ask(queues, kind, opcode, **changes):
    """Status of a valid command with other values of some fields."""
    sqe, size = VALID[kind, opcode]
    data = bytes(size) if opcode & 3 == 1 and kind == Csi.NVM else b""
    options = {} if data else {"sgl_type": 0x5A, "sgl_bytes": size}
    return queues[kind].command(sqe._replace(**changes), data, **options).status


@pytest.mark.parametrize(("kind", "opcode"), VALID)
def test_commands_without_unsupported_fields_succeed(queues, kind, opcode):
    assert ask(queues, kind, opcode) == 0
    for flags in (0x00, 0x41, 0x42, 0x80, 0xC0):  # PRPs, fused, a metadata SGL, reserved
        assert ask(queues, kind, opcode, flags=flags) == INVALID, hex(flags)


@pytest.mark.parametrize(("kind", "opcode", "field"), FIELDS)
def test_every_bit_of_an_unsupported_field_is_refused(queues, kind, opcode, field):
    sqe, _ = VALID[kind, opcode]
    bits = [1 << bit for bit in range(64) if field.mask >> bit & 1]
    assert sum(bits) == field.mask and not getattr(sqe, field.word) & field.mask
    for bit in bits:
        changed = {field.word: getattr(sqe, field.word) | bit}
        assert ask(queues, kind, opcode, **changed) == INVALID, f"{field.name}: {bit:#x}"


def test_documented_fields_are_those_of_the_table():
    text = DOCS.read_text().partition("### Unsupported fields")[2].partition("### ")[0]
    rows = re.findall(r"^\| (?!commands|---)(.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    documented = {(name, why) for _, names, why in rows for name in names.replace(" and ", ", ").split(", ")}
    fields = [field for fields in UNSUPPORTED.values() for field in fields]
    assert documented == {(name, field.declared) for field in fields for name in field.name.split(", ")}
