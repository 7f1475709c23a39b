"""Isolation of tenants: handles that are valid only for the tenant that created the sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import blake2s
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_firmware.check import NO_LIMIT, InvalidFieldError, seqs_of
from csd_firmware.objects import unnamed_sequences
from csd_firmware.slices import SEQUENCES, ends, is_long, join_slices, slices
from csd_firmware.state import Quota
from csd_firmware.step import Firmware, status_of
from csd_link.served_drive import DEFAULT
from csd_spec import Command, Completion, KvFree, SeqSweep, Status
from csd_spec.verbs import VERBS, Array, ArrayType, CreatesSequences, ForksSequences, SequenceAccess
from ftl import FtlError, UnknownSequenceError

_ROUNDS = 6
_HALF = (1 << 32) - 1


class HandleCipher:
    """Encrypts sequence numbers to handles: a permutation of 64-bit numbers under a key per tenant.

    A Feistel network of six rounds with keyed BLAKE2s as the round function. It needs no table: a guessed handle, or
    one of another tenant, decrypts to a number that no sequence has.
    """

    def __init__(self, secret: bytes, tenant: str) -> None:
        self._key = blake2s(tenant.encode(), key=secret).digest()

    def encrypt(self, number: int) -> int:
        """Return the handle of a sequence number."""
        left, right = number >> 32, number & _HALF
        for turn in range(_ROUNDS):
            left, right = right, left ^ self._round(turn, right)
        return left << 32 | right

    def decrypt(self, handle: int) -> int:
        """Return the sequence number of a handle."""
        left, right = handle >> 32 & _HALF, handle & _HALF
        for turn in reversed(range(_ROUNDS)):
            left, right = right ^ self._round(turn, left), left
        return left << 32 | right

    def _round(self, turn: int, half: int) -> int:
        digest = blake2s(bytes([turn]) + half.to_bytes(4, "little"), key=self._key, digest_size=4).digest()
        return int.from_bytes(digest, "little")


def label_of(name: str) -> int:
    """Label of a tenant's sequences, less than 2^56."""
    return 0 if name == DEFAULT else int.from_bytes(blake2s(name.encode(), digest_size=7).digest(), "little")


class Tenant:
    """Access of one tenant to a firmware: `step` uses the tenant's handles."""

    def __init__(
        self,
        firmware: Firmware,
        secret: bytes,
        name: str = DEFAULT,
        share: float = 1.0,
        turns: AbstractContextManager[object] | None = None,
    ) -> None:
        """Create a tenant.

        Args:
            share: Fraction of the drive that it may use; below 1, its long commands are carried out in slices.
            turns: Entered for every command or slice, if the firmware has other users.
        """
        self._firmware, self._handles = firmware, HandleCipher(secret, name)
        self._shares, self._turn = share < 1, turns or nullcontext()
        self._label = label_of(name)
        self._numbers: dict[int, int] = {}  # handle -> number, of handles in use
        self._epoch_ns = 0
        if self._shares:
            firmware.state.quotas[self._label] = Quota(name, share)

    def attach(self) -> None:
        """Begin a host's session: its simulated time 0 is when all earlier work of the drive is done."""
        timing = self._firmware.ftl.timing
        busy_ns = max(self._firmware.now_ns, timing.idle_ns())
        self._epoch_ns = -(-busy_ns // timing.grain_ns) * timing.grain_ns

    def _owns(self, number: int) -> bool:
        """Whether a sequence is this tenant's; after a power loss, numbers may be reused for any tenant."""
        seq = self._firmware.ftl.sequences.get(number)
        return seq is not None and seq.label == self._label

    def refuse(self, command: str, status: Status, reason: str, submit_ns: int) -> Completion:
        """Completion for an invalid command."""
        with self._turn:
            return self._firmware.refuse(command, status, reason, submit_ns)

    def step(self, command: Command, submit_ns: int, max_bytes: int = NO_LIMIT) -> Completion:
        """Like `Firmware.step`, with this tenant's handles; those of other tenants are unknown.

        Args:
            max_bytes: Limit on the completion's data; commands that would exceed it are rejected.
        """
        verb = VERBS.get(type(command))
        if verb is None:
            with self._turn:
                return self._firmware.step(command, submit_ns)  # rejects it
        try:
            if verb.access is not SequenceAccess.NONE:
                numbers = tuple(map(self._number, map(int, seqs_of(command))))
                command = replace(command, seqs=numbers)  # type: ignore[arg-type]  # only some of the union have seqs
            parts = self._parts(command, max_bytes) if self._shares else [command]
        except (InvalidFieldError, FtlError) as error:
            return self.refuse(verb.name, status_of(error), str(error), submit_ns)
        done = self._run(command, parts, submit_ns + self._epoch_ns, max_bytes)
        data = done.data
        if done.status is Status.SUCCESS:
            data = tuple(self._encrypt_handles(array, values) for array, values in zip(verb.reply, data, strict=True))
        return replace(done, submit_ns=submit_ns, finish_ns=done.finish_ns - self._epoch_ns, data=data)

    def _parts(self, command: Command, max_bytes: int) -> list[Command]:
        """Slice a command; raises InvalidFieldError or an FtlError for an invalid long one.

        The check runs without a turn: it depends only on this tenant's sequences, which are not changed meanwhile.
        """
        if isinstance(command, SeqSweep):
            with self._turn:
                gone = unnamed_sequences(self._firmware.state, self._label)
            return slices(KvFree(tuple(gone))) if len(gone) > SEQUENCES else [command]
        if not is_long(command):
            return [command]
        self._firmware.check(command, self._label, max_bytes)
        return slices(command)

    def _run(self, command: Command, parts: list[Command], submit_ns: int, max_bytes: int) -> Completion:
        """Carry out the parts of a command; if one is rejected, sequences created by earlier parts are freed."""
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
            assert done.finish_ns >= at_ns, "a slice ended before it began"
            carried_out.append(done)
            if ends(part, done):
                break
        return join_slices(command, parts, carried_out)

    def _undo(self, command: Command, carried_out: list[Completion]) -> None:
        if isinstance(VERBS[type(command)].effect, CreatesSequences | ForksSequences):
            for done in carried_out:
                with self._turn:
                    self._firmware.step(KvFree(tuple(done.data[0].tolist())), done.finish_ns, self._label)

    def _encrypt_handles(self, array: Array, data: NDArray[Any]) -> NDArray[Any]:
        """Convert an array of a reply to this tenant's handles; 0 stays 0."""
        if array.kind is not ArrayType.HANDLES:
            return data
        return np.array([self._handles.encrypt(number) if number else 0 for number in data.tolist()], np.uint64)

    def _number(self, handle: int) -> int:
        """Decrypt a handle of this tenant; raises UnknownSequenceError for any other."""
        number = self._numbers.get(handle)
        if number is None or not self._owns(number):
            self._numbers.pop(handle, None)
            number = self._handles.decrypt(handle)
            if not self._owns(number):
                raise UnknownSequenceError(f"no sequence {handle:#x} of this tenant on this drive")
            self._numbers[handle] = number
        return number
