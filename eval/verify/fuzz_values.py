"""Random Key Value commands of a tenant on a drive with two tenants; a dictionary predicts the result of each."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from csd_firmware import Firmware
from csd_firmware.process.listen import TenantValues
from csd_firmware.values import Values
from csd_link.nvmeof.commands import Answer, Code, CommandError, Sqe
from csd_link.nvmeof.key_value import KeyValue, KeyValueNamespace

KEYS = [b"a", b"a\0", b"b", b"\xff" * 15, b"k" * 16]
LENGTHS = (0, 1, 1, 2, 2, 15, 16, 16, 17, 255)
SIZES = (0, 0, 1, 3, 4, 5, 511, 512, 1024, 1025, 5000, 20_000, (1 << 32) - 1)
MAX_BYTES = 1 << 16  # of a command's data; a controller refuses what is above its MDTS
_VICTIM, _ATTACKER = "victim", "attacker"


@dataclass(frozen=True, slots=True)
class ExpectedResult:
    """Required result of a command. may_lack_room: Capacity Exceeded is also allowed."""

    status: int = 0
    data: bytes = b""
    result: int = 0
    may_lack_room: bool = False


class FuzzedValues:
    """Values of both tenants of a drive.

    Attributes:
        model: Values of the attacker by key.
    """

    def __init__(self, firmware: Firmware, secret: bytes) -> None:
        """secret: a value of the victim, under every key."""
        self.model: dict[bytes, bytes] = {}
        self._firmware, self._secret = firmware, secret
        self._victim = Values(firmware, _VICTIM)
        for key in KEYS:
            self._victim.store(key, secret)
        self._namespace = _namespace_of(firmware)

    def command(self, draw: random.Random) -> tuple[Sqe, bytes]:
        """A random command and its data."""
        opcode = draw.choice((*KeyValue, KeyValue.STORE, KeyValue.STORE, draw.randrange(256)))
        key = draw.choice(KEYS).ljust(16, b"\0")
        if draw.random() < 0.1:
            key = draw.randbytes(16)
        size = draw.choice(SIZES)
        cdw11 = draw.choice(LENGTHS) | draw.choice((0, 0, 1, 2, 3, 4, draw.randrange(1 << 24))) << 8
        dwords = struct.unpack("<4I", key)
        sqe = Sqe(opcode, cdw2=dwords[0], cdw3=dwords[1], cdw10=size, cdw11=cdw11, cdw14=dwords[2], cdw15=dwords[3])
        data = draw.randbytes(size) if opcode == KeyValue.STORE and size <= MAX_BYTES else b""
        return sqe, data

    def run(self, sqe: Sqe, data: bytes) -> tuple[Answer | CommandError, str]:
        """Execute a command as a controller does.

        Returns what it returned, and what is wrong with that, empty if it is right.
        """
        try:
            if sqe.opcode not in self._namespace.effects:
                raise CommandError(Code.INVALID_OPCODE)
            if self._namespace.data_bytes(sqe) > MAX_BYTES:
                raise CommandError(Code.INVALID_FIELD)
            done: Answer | CommandError = self._namespace.execute(sqe, data, _ATTACKER)
        except CommandError as error:
            done = error
        expected = self._expected(sqe)
        if isinstance(done, CommandError):
            lacks_room = expected.may_lack_room and done.status == Code.CAPACITY_EXCEEDED
            wrong = done.status != expected.status and not lacks_room
        else:
            answer = b"".join(map(bytes, done.data)), done.result
            wrong = expected.status != 0 or answer != (expected.data, expected.result)
            self._change(sqe, data)
        return done, f"{expected} was expected, not {done!r}" if wrong else ""

    def _expected(self, sqe: Sqe) -> ExpectedResult:
        """Result required by the dictionary and the specification."""
        if sqe.opcode not in set(KeyValue):
            return ExpectedResult(Code.INVALID_OPCODE)
        if sqe.opcode in (KeyValue.STORE, KeyValue.RETRIEVE, KeyValue.LIST) and sqe.cdw10 > MAX_BYTES:
            return ExpectedResult(Code.INVALID_FIELD)
        if sqe.opcode == KeyValue.FLUSH:
            return ExpectedResult()
        length, options = sqe.cdw11 & 0xFF, sqe.cdw11 >> 8
        if length > 16 or (sqe.opcode == KeyValue.LIST and sqe.cdw10 < 4):
            return ExpectedResult(Code.INVALID_FIELD)
        key = _key_of(sqe)
        if sqe.opcode == KeyValue.LIST:
            return ExpectedResult(data=self._listed(key, sqe.cdw10))
        if not length:
            return ExpectedResult(Code.INVALID_KEY_SIZE)
        value = self.model.get(key)
        if sqe.opcode == KeyValue.STORE:
            if value is None and options & 1:
                return ExpectedResult(Code.UNKNOWN_KEY)
            return (
                ExpectedResult(Code.KEY_EXISTS)
                if value is not None and options & 2
                else ExpectedResult(may_lack_room=True)
            )
        if value is None:
            return ExpectedResult(Code.UNKNOWN_KEY)
        if sqe.opcode == KeyValue.RETRIEVE:
            return ExpectedResult(data=value[: sqe.cdw10], result=len(value))
        return ExpectedResult(result=len(value) if sqe.opcode == KeyValue.EXIST else 0)

    def _listed(self, first: bytes, size_bytes: int) -> bytes:
        entries, left = [], size_bytes - 4
        for key in sorted(stored for stored in self.model if stored >= first):
            entry = struct.pack("<H", len(key)) + key + bytes(-(len(key) + 2) % 4)
            left -= len(entry)
            if left < 0:
                break
            entries.append(entry)
        return struct.pack("<I", len(entries)) + b"".join(entries)

    def _change(self, sqe: Sqe, data: bytes) -> None:
        if sqe.opcode == KeyValue.STORE:
            self.model[_key_of(sqe)] = data
        elif sqe.opcode == KeyValue.DELETE:
            self.model.pop(_key_of(sqe), None)

    def lost(self) -> int:
        """Flush, lose the power, and count values of both tenants that are lost or other than they were."""
        self._victim.flush()
        again = Firmware(self._firmware.spec, self._firmware.ftl.nand)
        wanted = {_ATTACKER: self.model, _VICTIM: dict.fromkeys(KEYS, self._secret)}
        return sum(_differing(Values(again, tenant), values) for tenant, values in wanted.items())


def _differing(values: Values, wanted: dict[bytes, bytes]) -> int:
    stored = {key: values.retrieve(key)[0] for key in values.keys()}  # noqa: SIM118  # a method, not a dictionary's
    return sum(stored.get(key) != wanted.get(key) for key in stored.keys() | wanted.keys())


def _key_of(sqe: Sqe) -> bytes:
    return struct.pack("<4I", sqe.cdw2, sqe.cdw3, sqe.cdw14, sqe.cdw15)[: sqe.cdw11 & 0xFF]


def _namespace_of(firmware: Firmware) -> KeyValueNamespace:
    """The attacker's namespace."""
    values = TenantValues(Values(firmware, _ATTACKER))
    return KeyValueNamespace(lambda host: values, bytes(16))
