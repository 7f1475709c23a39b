"""Who may name which sequence: handles that only the tenant who created a sequence can have."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2s
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_firmware.check import NO_LIMIT, Refused, seqs_of
from csd_firmware.step import Firmware
from csd_link.served_drive import DEFAULT
from csd_spec import Command, Completion, Status
from csd_spec.verbs import VERBS, Array, Kind, Names
from ftl import UnknownSequence

_ROUNDS = 6
_HALF = (1 << 32) - 1


class Handles:
    """Numbers of sequences as one tenant sees them: a permutation of 64-bit numbers under a key of its own.

    A Feistel network of six rounds whose round function is keyed BLAKE2s. Nothing has to be kept: a number that a
    tenant makes up, or was given to another, comes out as one that no sequence has.
    """

    def __init__(self, secret: bytes, tenant: str) -> None:
        self._key = blake2s(tenant.encode(), key=secret).digest()

    def of(self, number: int) -> int:
        """The handle of a sequence's number."""
        left, right = number >> 32, number & _HALF
        for turn in range(_ROUNDS):
            left, right = right, left ^ self._round(turn, right)
        return left << 32 | right

    def number(self, handle: int) -> int:
        """The number behind a handle."""
        left, right = handle >> 32 & _HALF, handle & _HALF
        for turn in reversed(range(_ROUNDS)):
            left, right = right ^ self._round(turn, left), left
        return left << 32 | right

    def _round(self, turn: int, half: int) -> int:
        digest = blake2s(bytes([turn]) + half.to_bytes(4, "little"), key=self._key, digest_size=4).digest()
        return int.from_bytes(digest, "little")


class Tenant:
    """One tenant's way into a firmware: `step` takes and gives its handles."""

    def __init__(self, firmware: Firmware, secret: bytes, name: str = DEFAULT) -> None:
        self._firmware, self._handles = firmware, Handles(secret, name)
        self._label = 0 if name == DEFAULT else int.from_bytes(blake2s(name.encode(), digest_size=7).digest(), "little")
        self._numbers: dict[int, int] = {}  # of handles in use
        self._epoch_ns = 0

    def attach(self) -> None:
        """A host begins: its modelled time is 0 when the drive has done all that it was given before."""
        timing = self._firmware.ftl.timing
        busy_ns = max(self._firmware.free_ns, timing.idle_ns())
        self._epoch_ns = -(-busy_ns // timing.grain_ns) * timing.grain_ns

    def _owns(self, number: int) -> bool:
        """Whether a sequence is this tenant's: numbers that a loss of power took back are given again, to anyone."""
        seq = self._firmware.ftl.sequences.get(number)
        return seq is not None and seq.label == self._label

    def refuse(self, command: str, status: Status, reason: str, submit_ns: int) -> Completion:
        """The completion of what is no good command."""
        return self._firmware.refuse(command, status, reason, submit_ns)

    def step(self, command: Command, submit_ns: int, max_bytes: int = NO_LIMIT) -> Completion:
        """`Firmware.step` for commands with this tenant's handles; another's are as unknown as made up ones.

        max_bytes: of data in the completion; a command that would return more is refused.
        """
        verb = VERBS.get(type(command))
        if verb is None:
            return self._firmware.step(command, submit_ns)  # which refuses it
        if verb.names is not Names.NONE:
            try:
                numbers = tuple(map(self._number, seqs_of(command)))
            except Refused as error:
                return self.refuse(verb.name, Status.INVALID_FIELD, str(error), submit_ns)
            except UnknownSequence as error:
                return self.refuse(verb.name, Status.UNKNOWN_SEQUENCE, str(error), submit_ns)
            command = replace(command, seqs=numbers)  # type: ignore[arg-type]  # only some of the union have seqs
        done = self._firmware.step(command, submit_ns + self._epoch_ns, self._label, max_bytes)
        done = replace(done, submit_ns=submit_ns, finish_ns=done.finish_ns - self._epoch_ns)
        if done.status is Status.SUCCESS:
            pairs = zip(verb.reply, done.data, strict=True)
            done = replace(done, data=tuple(self._seen(each, data) for each, data in pairs))
        return done

    def _seen(self, array: Array, data: NDArray[Any]) -> NDArray[Any]:
        """An array of a reply, with this tenant's handles; 0 is none."""
        if array.kind is not Kind.HANDLES:
            return data
        return np.array([self._handles.of(number) if number else 0 for number in data.tolist()], np.uint64)

    def _number(self, handle: int) -> int:
        """The number behind a handle of this tenant's; raises UnknownSequence for any other."""
        number = self._numbers.get(handle)
        if number is None or not self._owns(number):
            self._numbers.pop(handle, None)
            number = self._handles.number(handle)
            if not self._owns(number):
                raise UnknownSequence(f"no sequence {handle:#x} of this tenant on this drive")
            self._numbers[handle] = number
        return number
