"""A queue over a simulated disk: requests end in an order that a seed draws, and fail as it likes."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

from csd_io.queue import IoCompletion, IoRequest, check, outcome
from vcsd_eval.verify.simulation.disk import SECTOR, SimDisk


class SimQueue:
    """Blocks of a file of a `SimDisk`, whose `fault` its writes meet. A request is carried out when it ends.

    bad, short: shares of the reads that fail with EIO, and that end early; what their buffers hold then is garbage.
    """

    how = "simulated"
    block_bytes = SECTOR

    def __init__(self, disk: SimDisk, file: str, size_bytes: int, draw: random.Random) -> None:
        self.name, self.size_bytes, self._draw = f"{disk.name}/{file}", size_bytes, draw
        self.max_bytes, self.depth = 64 * SECTOR, 32
        self.bad = self.short = 0.0
        self.most_flying = 0
        self._disk, self._file = disk, disk.open(file, size_bytes)
        self._flying: list[IoRequest] = []

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Nothing is gained."""

    def submit(self, requests: Sequence[IoRequest]) -> None:
        check(self, requests, len(self._flying))
        self._flying += requests
        self.most_flying = max(self.most_flying, len(self._flying))

    def reap(self, at_least: int) -> list[IoCompletion]:
        at_least = min(at_least, len(self._flying))
        count = self._draw.randint(at_least, len(self._flying))
        self._draw.shuffle(self._flying)
        ended, self._flying = self._flying[:count], self._flying[count:]
        return [outcome(self.name, request, self._carry_out(request)) for request in ended]

    def _carry_out(self, request: IoRequest) -> int:
        size, luck = request.buffer.nbytes, self._draw.random()
        if request.op == "write":
            try:
                self._file.write(request.offset, request.buffer)
            except OSError as error:
                return -(error.errno or 0)
            return size
        self._file.read(request.offset, request.buffer)
        if luck >= self.bad + self.short:
            return size
        request.buffer[:] = self._draw.randbytes(size)
        return -errno.EIO if luck < self.bad else size - SECTOR

    def discard(self, offset: int, size: int) -> None:
        self._file.discard(offset, size)

    def sync(self) -> None:
        self._disk.sync()

    def close(self) -> None:
        self.reap(len(self._flying))
