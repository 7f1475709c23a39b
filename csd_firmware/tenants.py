"""Who may name which sequence: handles that only the tenant who created a sequence can have."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import blake2s
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_firmware.check import NO_LIMIT, Refused, seqs_of
from csd_firmware.objects import unnamed
from csd_firmware.slices import SEQUENCES, ends, is_long, joined, slices
from csd_firmware.state import Quota
from csd_firmware.step import Firmware, status_of
from csd_link.served_drive import DEFAULT
from csd_spec import Command, Completion, KvFree, SeqSweep, Status
from csd_spec.verbs import VERBS, Array, ArrayType, CreatesSequences, ForksSequences, SequenceAccess
from ftl import FtlError, UnknownSequenceError

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


def label_of(name: str) -> int:
    """The label of a tenant's sequences, less than 2^56."""
    return 0 if name == DEFAULT else int.from_bytes(blake2s(name.encode(), digest_size=7).digest(), "little")


class Tenant:
    """One tenant's way into a firmware: `step` takes and gives its handles.

    share: what it may use of the drive, above 0 to 1; with less than 1 its long commands are carried out in slices.
    turns: entered for every command, or slice of one, where the firmware has other users too.
    """

    def __init__(
        self,
        firmware: Firmware,
        secret: bytes,
        name: str = DEFAULT,
        share: float = 1.0,
        turns: AbstractContextManager[object] | None = None,
    ) -> None:
        self._firmware, self._handles = firmware, Handles(secret, name)
        self._shares, self._turn = share < 1, turns or nullcontext()
        self._label = label_of(name)
        self._numbers: dict[int, int] = {}  # of handles in use
        self._epoch_ns = 0
        if self._shares:
            firmware.state.quotas[self._label] = Quota(name, share)

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
        with self._turn:
            return self._firmware.refuse(command, status, reason, submit_ns)

    def step(self, command: Command, submit_ns: int, max_bytes: int = NO_LIMIT) -> Completion:
        """`Firmware.step` for commands with this tenant's handles; another's are as unknown as made up ones.

        max_bytes: of data in the completion; a command that would return more is refused.
        """
        verb = VERBS.get(type(command))
        if verb is None:
            with self._turn:
                return self._firmware.step(command, submit_ns)  # which refuses it
        try:
            if verb.access is not SequenceAccess.NONE:
                numbers = tuple(map(self._number, seqs_of(command)))
                command = replace(command, seqs=numbers)  # type: ignore[arg-type]  # only some of the union have seqs
            parts = self._parts(command, max_bytes) if self._shares else [command]
        except (Refused, FtlError) as error:
            return self.refuse(verb.name, status_of(error), str(error), submit_ns)
        done = self._run(command, parts, submit_ns + self._epoch_ns, max_bytes)
        data = done.data
        if done.status is Status.SUCCESS:
            data = tuple(self._seen(each, found) for each, found in zip(verb.reply, data, strict=True))
        return replace(done, submit_ns=submit_ns, finish_ns=done.finish_ns - self._epoch_ns, data=data)

    def _parts(self, command: Command, max_bytes: int) -> list[Command]:
        """A command in slices; raises Refused or an FtlError for a long one that must not be carried out.

        That is found out while others have their turns: it depends on this tenant's sequences, which wait for it.
        """
        if isinstance(command, SeqSweep):
            with self._turn:
                gone = unnamed(self._firmware.state, self._label)
            return slices(KvFree(tuple(gone))) if len(gone) > SEQUENCES else [command]
        if not is_long(command):
            return [command]
        self._firmware.check(command, self._label, max_bytes)
        return slices(command)

    def _run(self, command: Command, parts: list[Command], submit_ns: int, max_bytes: int) -> Completion:
        """Carry out a command that was cut into parts; where one is refused, what those before it made is freed."""
        carried_out = list[Completion]()
        for part in parts:
            at_ns = carried_out[-1].finish_ns if carried_out else submit_ns
            with self._turn:
                done = self._firmware.step(part, at_ns, self._label, max_bytes)
            if len(parts) == 1:
                return done
            if done.status is not Status.SUCCESS:
                self._undo(command, carried_out)
                return replace(done, submit_ns=submit_ns, finish_ns=submit_ns)
            carried_out.append(done)
            if ends(part, done):
                break
        return joined(command, parts, carried_out)

    def _undo(self, command: Command, carried_out: list[Completion]) -> None:
        if isinstance(VERBS[type(command)].effect, CreatesSequences | ForksSequences):
            for done in carried_out:
                with self._turn:
                    self._firmware.step(KvFree(tuple(done.data[0].tolist())), done.finish_ns, self._label)

    def _seen(self, array: Array, data: NDArray[Any]) -> NDArray[Any]:
        """An array of a reply, with this tenant's handles; 0 is none."""
        if array.kind is not ArrayType.HANDLES:
            return data
        return np.array([self._handles.of(number) if number else 0 for number in data.tolist()], np.uint64)

    def _number(self, handle: int) -> int:
        """The number behind a handle of this tenant's; raises UnknownSequenceError for any other."""
        number = self._numbers.get(handle)
        if number is None or not self._owns(number):
            self._numbers.pop(handle, None)
            number = self._handles.number(handle)
            if not self._owns(number):
                raise UnknownSequenceError(f"no sequence {handle:#x} of this tenant on this drive")
            self._numbers[handle] = number
        return number
