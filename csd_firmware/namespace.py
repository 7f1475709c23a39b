"""Block namespace as bytes: a write buffer in drive DRAM on top of the conventional mapping."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from csd_firmware.logs import namespace_pages
from csd_firmware.step import Firmware
from csd_spec.arrays import I64

LARGE_PAGES = 16
BUFFER_PAGES = 512  # buffered pages that are programmed together


@dataclass(slots=True)
class Latency:
    """Simulated latency of one kind of request, ns."""

    requests: int = 0
    nbytes: int = 0
    total_ns: int = 0
    max_ns: int = 0

    def add(self, nbytes: int, ns: int) -> None:
        self.requests += 1
        self.nbytes += nbytes
        self.total_ns += ns
        self.max_ns = max(self.max_ns, ns)

    def to_dict(self) -> dict[str, float]:
        """Return the values for the latency log."""
        mean_ns = self.total_ns / max(1, self.requests)
        return {"requests": self.requests, "bytes": self.nbytes, "mean_ns": mean_ns, "max_ns": self.max_ns}


class Namespace:
    """Reads and writes of any offset and size.

    A write is complete when it is in the buffer; `flush` makes it durable. `read`, `write` and `discard` are timed one
    after the other. `read_at` and `write_at` take submission times, in ascending order: overlapping requests share the
    flash, and take turns on each direction of the link. Changes raise MediaFailedError on a failed drive, and an
    unexpected error in them fails the drive.
    """

    def __init__(self, firmware: Firmware, lock: AbstractContextManager[object]) -> None:
        self._firmware, self._lock = firmware, lock
        blocks = firmware.ftl.blocks
        self.page_bytes = firmware.spec.geometry.page_bytes
        blocks.resize(namespace_pages(firmware.ftl))
        self.size_bytes = blocks.pages * self.page_bytes
        self._buffer: dict[int, bytes] = {}  # logical page -> content
        self._now_ns = self._busy_until_ns = 0
        self._link_free_ns = {"in": 0, "out": 0}
        self._programs: deque[tuple[int, int]] = deque()  # programs that may be running: end (ns), pages
        self.latency = {kind: Latency() for kind in ("read", "write", "flush", "discard")}

    @property
    def free_bytes(self) -> int:
        """Bytes of pages that are not mapped to flash."""
        return self.size_bytes - self._firmware.ftl.blocks.mapped * self.page_bytes

    def read(self, offset: int, size: int) -> bytes:
        """Read at most `size` bytes; fewer at the end of the namespace."""
        with self._lock:
            data, self._now_ns = self._read(offset, size, self._now_ns)
        return data

    def read_at(self, offset: int, size: int, submit_ns: int) -> tuple[bytes, int]:
        """Like `read`; also returns when the bytes have crossed the link, simulated ns."""
        with self._lock:
            return self._read(offset, size, submit_ns)

    def _read(self, offset: int, size: int, submit_ns: int) -> tuple[bytes, int]:
        size = max(0, min(size, self.size_bytes - offset))
        if not size:
            return b"", submit_ns
        page, end = self.page_bytes, offset + size
        first, last = offset // page, -(-end // page)
        data, ready_ns = self._pages(first, last, submit_ns)
        finish_ns = self._cross("out", size, ready_ns)
        self._done("read", size, submit_ns, finish_ns)
        return data if len(data) == size else data[offset - first * page : end - first * page], finish_ns

    def write(self, offset: int, data: bytes) -> int:
        """Buffer the data that fits the namespace; returns the number of bytes."""
        with self._lock, self._firmware.failing("write"):
            done, self._now_ns = self._write(offset, data, self._now_ns, self._now_ns)
        return done

    def write_at(self, offset: int, data: bytes, submit_ns: int) -> tuple[int, int]:
        """Like `write`; also returns when the bytes are in the buffer, simulated ns.

        The buffer accepts them as soon as earlier programs have freed space.
        """
        with self._lock, self._firmware.failing("write"):
            return self._write(offset, data, submit_ns, self._room_ns(submit_ns))

    def _write(self, offset: int, data: bytes, submit_ns: int, begin_ns: int) -> tuple[int, int]:
        data = data[: max(0, self.size_bytes - offset)]
        page = self.page_bytes
        finish_ns = self._cross("in", len(data), begin_ns)
        if len(data) >= LARGE_PAGES * page and not (offset % page or len(data) % page):
            self._program(np.arange(offset // page, (offset + len(data)) // page), data, finish_ns)
        else:
            finish_ns = self._buffer_bytes(offset, data, finish_ns)
        self._done("write", len(data), submit_ns, finish_ns)
        return len(data), finish_ns

    def discard(self, offset: int, size: int) -> None:
        """Zero bytes, and unmap whole pages; see `BlockNamespace.discard`."""
        end, page = min(offset + size, self.size_bytes), self.page_bytes
        first, last = -(-offset // page), end // page
        with self._lock, self._firmware.failing("discard"):
            start_ns = self._now_ns
            self._now_ns += self._firmware.spec.link.command_ns
            edge = min(first * page, end)
            for at, until in ((offset, edge), (max(last * page, edge), end)):
                self._now_ns = self._buffer_bytes(at, bytes(max(0, until - at)), self._now_ns)
            if first < last:
                self._firmware.ftl.blocks.discard(first, last - first)
                for number in [number for number in self._buffer if first <= number < last]:
                    del self._buffer[number]
            self._done("discard", max(0, end - offset), start_ns, self._now_ns)

    def _program(self, numbers: I64, data: bytes, start_ns: int) -> None:
        """Program pages in the background; large writes bypass the buffer at the same speed."""
        pages = np.frombuffer(data, np.uint8).reshape(-1, self.page_bytes)
        assert pages.shape[0] == numbers.size, f"{pages.shape[0]} pages of data for {numbers.size} pages"
        ends_ns = self._firmware.ftl.blocks.write(numbers, pages, start_ns)
        self._programs.append((ends_ns, numbers.size))
        while self._programs and self._programs[0][0] <= start_ns:
            self._programs.popleft()
        for number in numbers.tolist() if self._buffer else ():
            self._buffer.pop(number, None)

    def _room_ns(self, now_ns: int) -> int:
        """When programs have freed enough of the buffer for another request, ns."""
        waiting = sum(pages for _, pages in self._programs)
        for ends_ns, pages in self._programs:
            if waiting <= BUFFER_PAGES:
                break
            now_ns, waiting = max(now_ns, ends_ns), waiting - pages
        return now_ns

    def _buffer_bytes(self, offset: int, data: bytes, now_ns: int) -> int:
        """Buffer bytes; returns when the rest of partially written pages has been read, ns."""
        page, done = self.page_bytes, 0
        while done < len(data):
            number, inside = divmod(offset + done, page)
            part = data[done : done + page - inside]
            if len(part) < page:
                whole, now_ns = self._pages(number, number + 1, now_ns)
                part = whole[:inside] + part + whole[inside + len(part) :]
            assert len(part) == page, f"page {number}: {len(part)} bytes in the buffer"
            self._buffer[number] = part
            done += page - inside
        if len(self._buffer) >= BUFFER_PAGES:
            self._destage(now_ns)
        return now_ns

    def flush(self) -> None:
        """Program the buffer, and make it durable."""
        with self._lock, self._firmware.failing("flush"):
            start_ns = self._now_ns
            self._destage(start_ns)
            self._now_ns = self._firmware.ftl.flush(start_ns)
            self._done("flush", 0, start_ns, self._now_ns)

    def _done(self, kind: str, nbytes: int, submit_ns: int, finish_ns: int) -> None:
        """Record a completed request in the latency log and the health counters."""
        counters = self._firmware.ftl.counters
        assert finish_ns >= submit_ns, f"{kind} ended before it began"
        self.latency[kind].add(nbytes, finish_ns - submit_ns)
        counters.host_reads += kind == "read"
        counters.host_writes += kind == "write"
        counters.busy_ns += max(0, finish_ns - max(submit_ns, self._busy_until_ns))
        self._busy_until_ns = max(finish_ns, self._busy_until_ns)

    def _pages(self, first: int, last: int, start_ns: int) -> tuple[bytes, int]:
        """Current content of pages, and when it is available, ns."""
        buffer, blocks, ready_ns = self._buffer, self._firmware.ftl.blocks, start_ns
        if last == first + 1:
            content = buffer.get(first)
            if content is None:
                content, ready_ns = blocks.read_page(first, start_ns)
        else:
            flash = [number for number in range(first, last) if number not in buffer]
            rows, ready_ns = blocks.read(np.array(flash, np.int64), start_ns)
            if len(flash) == last - first:
                content = rows.tobytes()
            else:
                found = dict(zip(flash, rows, strict=True))
                content = b"".join(buffer.get(number) or found[number].tobytes() for number in range(first, last))
        assert len(content) == (last - first) * self.page_bytes and ready_ns >= start_ns
        return content, ready_ns

    def _destage(self, now_ns: int) -> None:
        """Program the buffer's pages; they stay buffered if flash is full."""
        if self._buffer:
            numbers = np.fromiter(self._buffer, np.int64, len(self._buffer))
            self._program(numbers, b"".join(self._buffer.values()), now_ns)

    def _cross(self, way: str, nbytes: int, ready_ns: int) -> int:
        """When bytes have crossed the link in one direction, after earlier requests, ns."""
        link = self._firmware.spec.link
        left_ns = max(ready_ns, self._link_free_ns[way]) + link.transfer_ns(nbytes)
        self._link_free_ns[way] = left_ns
        return left_ns + link.command_ns
