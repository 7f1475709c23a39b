"""io_uring through its system calls: one call submits many requests and waits for completions.

Structures are those of linux/io_uring.h. The shared rings are accessed right after a system call, which orders memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from csd_io.queue import address
from csd_spec.arrays import I64

READ_FIXED, WRITE_FIXED, READ, WRITE, URING_CMD = 4, 5, 22, 23, 46  # enum io_uring_op
CMD_FIXED = 1  # IORING_URING_CMD_FIXED: the command's buffer is registered

_LINK = 1 << 2  # IOSQE_IO_LINK
_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture
_WIDE_SUBMISSIONS, _WIDE_COMPLETIONS = 1 << 10, 1 << 11  # IORING_SETUP_SQE128, IORING_SETUP_CQE32
_SINGLE_MMAP = 1  # IORING_FEAT_SINGLE_MMAP
_GET_EVENTS, _REGISTER_BUFFERS, _ENTRIES_AT = 1, 0, 0x10000000
_PARAMS = struct.Struct("<10I 8IQ 8IQ")  # sizes, flags, features; offsets in the submission and completion rings
# opcode, flags, ioprio, fd, offset or command, address, length, flags, user data, buffer index, personality, splice fd;
# a driver's command follows
_ENTRY = struct.Struct("<BBHiQQIIQHHi")
_ENTRY_BYTES, _WIDE_BYTES = 64, 128
_MOVE = np.dtype(  # an entry of a plain read or write
    {
        "names": ["op", "fd", "offset", "where", "size", "user"],
        "formats": ["u1", "<i4", "<u8", "<u8", "<u4", "<u8"],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": _ENTRY_BYTES,
    }
)
_COMPLETION = struct.Struct("<Qi")  # user data, result
_MASK = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Ring:
    """Submission and completion rings of one thread.

    Args:
        entries: Submission entries; the completion ring has twice as many.
        uses_sqe128: Use 128-byte entries, for driver commands.

    Raises:
        OSError: io_uring is not available, or not allowed.
    """

    def __init__(self, entries: int, uses_sqe128: bool = False) -> None:
        flags = _WIDE_SUBMISSIONS | _WIDE_COMPLETIONS if uses_sqe128 else 0
        given = ctypes.create_string_buffer(_PARAMS.pack(0, 0, flags, *(0,) * 25), _PARAMS.size)
        self._fd = _call(_SETUP, entries, given)
        values = _PARAMS.unpack(given.raw)
        self.entries, completions, features = values[0], values[1], values[5]
        if not features & _SINGLE_MMAP:
            os.close(self._fd)
            raise OSError(errno.ENOSYS, "io_uring of a kernel before 5.4")
        submission, completion = values[10:19], values[19:28]
        self._entry_bytes, self._completion_bytes = (_WIDE_BYTES, 32) if uses_sqe128 else (_ENTRY_BYTES, 16)
        array, self._completions_at = submission[6], completion[5]
        size = max(array + 4 * self.entries, self._completions_at + completions * self._completion_bytes)
        self._map = mmap.mmap(self._fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        entry_map = self.entries * self._entry_bytes
        self._entry_map = mmap.mmap(self._fd, entry_map, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=_ENTRIES_AT)
        self._words = memoryview(self._map)[: size & ~3].cast("I")
        self._tail = submission[1] // 4
        self._head_of_completions, self._tail_of_completions = completion[0] // 4, completion[1] // 4
        self._completions = completions
        for number in range(self.entries):
            self._words[array // 4 + number] = number
        self._prepared = 0  # entries not yet submitted

    def move(self, op: int, fd: int, offset: int, buffer: tuple[int, int, int], user: int) -> None:
        """Prepare a read or write; `buffer` is its address, its bytes, and its index among registered buffers."""
        where, size, index = buffer
        self._prepare(_ENTRY.pack(op, 0, 0, fd, offset, where, size, 0, user, index, 0, 0))

    def move_many(self, op: int, fd: int, offsets: I64, where: I64, sizes: I64, first: int) -> None:
        """Prepare one read or write per offset, at most `entries`.

        Args:
            where: Buffer addresses.
            first: User data of the first request; the others are numbered consecutively.
        """
        if self._prepared + offsets.size > self.entries:
            self.enter(0)
        assert self._prepared + offsets.size <= self.entries, "an entry would overwrite one that is not submitted"
        entries = np.zeros(offsets.size, _MOVE)
        entries["op"], entries["fd"], entries["offset"], entries["where"] = op, fd, offsets, where
        entries["size"], entries["user"] = sizes, first + np.arange(offsets.size)
        tail = self._words[self._tail]
        all_entries = np.frombuffer(self._entry_map, _MOVE)
        all_entries[tail + np.arange(offsets.size) & self.entries - 1] = entries
        self._words[self._tail] = tail + offsets.size & _MASK
        self._prepared += offsets.size

    def command(self, fd: int, code: int, command: bytes, fixed: int | None, user: int, linked: bool = False) -> None:
        """Prepare a driver command of at most 80 bytes.

        Args:
            fixed: Index of its buffer if it is registered.
            linked: Start the next command only when this one is complete.
        """
        flags, index = (0, 0) if fixed is None else (CMD_FIXED, fixed)
        entry = _ENTRY.pack(URING_CMD, _LINK * linked, 0, fd, code, 0, 0, flags, user, index, 0, 0)
        self._prepare(entry + command)

    def _prepare(self, entry: bytes) -> None:
        if self._prepared == self.entries:
            self.enter(0)
        tail = self._words[self._tail]
        at = (tail & self.entries - 1) * self._entry_bytes
        self._entry_map[at : at + self._entry_bytes] = entry.ljust(self._entry_bytes, b"\0")
        self._words[self._tail] = tail + 1 & _MASK
        self._prepared += 1

    def enter(self, wait: int) -> None:
        """Submit the prepared entries, and wait until `wait` completions are available."""
        while True:
            try:
                self._prepared -= _call(_ENTER, self._fd, self._prepared, wait, _GET_EVENTS, None, 0)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno != errno.EAGAIN:  # the kernel was short of memory
                    raise
            assert self._prepared >= 0, "the kernel took more entries than there are"
            if not self._prepared:
                return

    def completions(self) -> list[tuple[int, int]]:
        """Return user data and result of all new completions."""
        found = []
        head, tail = self._words[self._head_of_completions], self._words[self._tail_of_completions]
        while head != tail:
            at = self._completions_at + (head & self._completions - 1) * self._completion_bytes
            found.append(_COMPLETION.unpack_from(self._map, at))
            head = head + 1 & _MASK
        self._words[self._head_of_completions] = head
        return found

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Pin buffers, in this order, one vector each: a single large one fails on Linux 6.1."""
        vectors = (ctypes.c_uint64 * (2 * len(buffers)))(*(x for b in buffers for x in (address(b), b.nbytes)))
        _call(_REGISTER, self._fd, _REGISTER_BUFFERS, vectors, len(buffers))

    def close(self) -> None:
        """Close the ring; requests in flight still complete."""
        self._words.release()
        for memory in (self._map, self._entry_map):
            with suppress(BufferError):  # still referenced by a traceback's array, which unmaps it later
                memory.close()
        os.close(self._fd)


def _call(number: int, *arguments: object) -> int:
    words = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"io_uring: {os.strerror(code)}")
    return result
