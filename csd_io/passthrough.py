"""Vendor-specific commands to a namespace through its character device (/dev/ng0n3)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csd_io.nvme import NAMESPACE_ID, URING_IO, execute_command, identify_open_controller, pack_command, transfer_bytes
from csd_io.queue import address
from csd_io.ring import Ring

CHAIN = 2  # maximum number of commands per `begin`
_MAPPED_BYTES = 1 << 20  # limit of Linux for a page-aligned user buffer of one command


@dataclass(frozen=True, slots=True)
class VendorCommand:
    """An I/O command with one buffer.

    Attributes:
        opcode: Its low two bits are the direction of the data.
        buffer: Data to or from the drive; the command owns it until it is complete.
        dwords: CDW10 to CDW15.

    """

    opcode: int
    buffer: memoryview
    dwords: Sequence[int]


class Passthrough:
    """Chains of commands to one namespace, for one thread: through io_uring or, if it is not available, ioctl.

    Attributes:
        max_bytes: Maximum data of a command, by MDTS and by the kernel's limit on user buffers.
        how: Name of the interface in use, for display.

    """

    def __init__(self, path: Path) -> None:
        """Open the device; raises OSError if it is not an NVMe namespace."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._nsid = fcntl.ioctl(self._fd, NAMESPACE_ID)
            mdts = identify_open_controller(self._fd)["mdts"]
        except OSError as error:
            os.close(self._fd)
            raise OSError(error.errno, "is not an NVMe namespace", str(path)) from error
        self.max_bytes = min(transfer_bytes(mdts), _MAPPED_BYTES)
        self.how = "io_uring"
        self._ring: Ring | None = None
        try:
            self._ring = Ring(CHAIN, uses_sqe128=True)
        except OSError as error:
            self.how = f"ioctl ({error.strerror})"
        self._begun: list[VendorCommand] = []
        self._found: dict[int, int] = {}  # statuses of completed commands, by number

    def begin(self, commands: Sequence[VendorCommand]) -> None:
        """Submit commands; each starts when the previous one is complete. None may be in flight."""
        assert not self._begun and len(commands) <= CHAIN
        self._begun = list(commands)
        if self._ring:
            for number, command in enumerate(commands):
                is_last = number == len(commands) - 1
                self._ring.command(self._fd, URING_IO, self._packed(command), None, number, linked=not is_last)
            self._ring.enter(0)

    def wait(self) -> list[int]:
        """Wait for the submitted commands.

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
        ended = [self._found[number] for number in range(len(self._begun))]
        self._begun.clear()
        self._found.clear()
        return ended

    def _by_ioctl(self, command: VendorCommand) -> int:
        try:
            return execute_command(self._fd, self._packed(command))
        except OSError as error:
            return -(error.errno or 0)

    def _packed(self, command: VendorCommand) -> bytes:
        return pack_command(command.opcode, self._nsid, address(command.buffer), command.buffer.nbytes, *command.dwords)

    def close(self) -> None:
        """Wait for commands in flight, and close the device."""
        if self._begun:
            self.wait()
        if self._ring:
            self._ring.close()
        os.close(self._fd)
