"""Commands of any opcode to a namespace by its character device, as /dev/ng0n3."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csd_io.nvme import NAMESPACE_ID, URING_IO, identify_open_controller, packed, transfer_bytes, wait_for
from csd_io.queue import address
from csd_io.ring import Ring

CHAIN = 2  # commands that one `begin` takes
_MAPPED_BYTES = 1 << 20  # of a buffer of a user that Linux maps for one command, if it begins at a page


@dataclass(frozen=True, slots=True)
class VendorCommand:
    """An I/O command with one buffer.

    Attributes:
        opcode: Its low two bits say which way the data goes.
        buffer: Data to or from the drive; belongs to the command until it has ended.
        dwords: CDW10 to CDW15.

    """

    opcode: int
    buffer: memoryview
    dwords: Sequence[int]


class Passthrough:
    """Chains of commands to one namespace, for one thread: by io_uring, or by ioctl where the kernel has none.

    Attributes:
        max_bytes: Most data of a command, as MDTS says and as the kernel maps buffers of a user.
        how: What carries commands out, for people.

    """

    def __init__(self, path: Path) -> None:
        """Open the device; raises OSError if it is no NVMe namespace."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._nsid = fcntl.ioctl(self._fd, NAMESPACE_ID)
            mdts = identify_open_controller(self._fd)["mdts"]
        except OSError as error:
            os.close(self._fd)
            raise OSError(error.errno, "is no NVMe namespace", str(path)) from error
        self.max_bytes = min(transfer_bytes(mdts), _MAPPED_BYTES)
        self.how = "io_uring"
        self._ring: Ring | None = None
        try:
            self._ring = Ring(CHAIN, wide=True)
        except OSError as error:
            self.how = f"ioctl ({error.strerror})"
        self._begun: list[VendorCommand] = []
        self._found: dict[int, int] = {}  # statuses of those that have ended, by number

    def begin(self, commands: Sequence[VendorCommand]) -> None:
        """Begin commands, each when the one before has ended; none may be under way."""
        assert not self._begun and len(commands) <= CHAIN
        self._begun = list(commands)
        if self._ring:
            for number, command in enumerate(commands):
                is_last = number == len(commands) - 1
                self._ring.command(self._fd, URING_IO, self._packed(command), None, number, linked=not is_last)
            self._ring.enter(0)

    def wait(self) -> list[int]:
        """Wait for what was begun.

        Returns:
            NVMe status of each command, 0 if it succeeded, or -errno if the kernel did not carry it out.

        """
        while len(self._found) < len(self._begun):
            if self._ring:
                self._ring.enter(len(self._begun) - len(self._found))
                self._found |= dict(self._ring.completions())
            else:
                number = len(self._found)
                self._found[number] = self._by_ioctl(self._begun[number])
        found = [self._found[number] for number in range(len(self._begun))]
        self._begun.clear()
        self._found.clear()
        return found

    def _by_ioctl(self, command: VendorCommand) -> int:
        try:
            return wait_for(self._fd, self._packed(command))
        except OSError as error:
            return -(error.errno or 0)

    def _packed(self, command: VendorCommand) -> bytes:
        return packed(command.opcode, self._nsid, address(command.buffer), command.buffer.nbytes, *command.dwords)

    def close(self) -> None:
        """Wait for what is under way, and close the device."""
        if self._begun:
            self.wait()
        if self._ring:
            self._ring.close()
        os.close(self._fd)
