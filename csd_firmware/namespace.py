"""The block namespace as bytes: a write buffer in drive DRAM before the conventional mapping."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from csd_firmware.logs import namespace_pages
from csd_firmware.step import Firmware
from csd_spec.arrays import I64

LARGE_PAGES = 16
BUFFER_PAGES = 512  # that wait in drive DRAM until they are programmed together


@dataclass(slots=True)
class Latency:
    """Modelled times of one kind of request, in nanoseconds."""

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
        """For the drive's log of latencies."""
        mean_ns = self.total_ns / max(1, self.requests)
        return {"requests": self.requests, "bytes": self.nbytes, "mean_ns": mean_ns, "max_ns": self.max_ns}


class Namespace:
    """Reads and writes of any offset and size. Modelled time is that of one request after the other.

    What was written waits in the buffer, a request is done when it is there; `flush` makes it survive a loss of power.
    """

    def __init__(self, firmware: Firmware, lock: threading.Lock) -> None:
        self._firmware, self._lock = firmware, lock
        blocks = firmware.ftl.blocks
        self.page_bytes = firmware.spec.geometry.page_bytes
        blocks.resize(namespace_pages(firmware.ftl))
        self.size_bytes = blocks.pages * self.page_bytes
        self._buffer: dict[int, bytes] = {}  # by logical page
        self._now_ns = 0
        self.latency = {"read": Latency(), "write": Latency(), "flush": Latency()}

    @property
    def free_bytes(self) -> int:
        """Of pages that hold nothing in flash."""
        return self.size_bytes - self._firmware.ftl.blocks.mapped * self.page_bytes

    def read(self, offset: int, size: int) -> bytes:
        """At most `size` bytes; fewer at the end of the namespace."""
        size = max(0, min(size, self.size_bytes - offset))
        if not size:
            return b""
        with self._lock:
            page, end, start_ns = self.page_bytes, offset + size, self._now_ns
            first, last = offset // page, -(-end // page)
            data = self._pages(first, last)
            self._now_ns += self._link_ns(size)
            self._done("read", size, start_ns)
        return data if len(data) == size else data[offset - first * page : end - first * page]

    def write(self, offset: int, data: bytes) -> int:
        """Buffer what fits the namespace; returns how many bytes that are."""
        data = data[: max(0, self.size_bytes - offset)]
        page = self.page_bytes
        with self._lock:
            start_ns = self._now_ns
            self._now_ns += self._link_ns(len(data))
            if len(data) >= LARGE_PAGES * page and not (offset % page or len(data) % page):
                self._program(np.arange(offset // page, (offset + len(data)) // page), data)
            else:
                self._keep(offset, data)
            self._done("write", len(data), start_ns)
        return len(data)

    def _program(self, numbers: I64, data: bytes) -> None:
        """A large write goes past the buffer, at the speed of the buffer: programs end in the background."""
        pages = np.frombuffer(data, np.uint8).reshape(-1, self.page_bytes)
        self._firmware.ftl.blocks.write(numbers, pages, self._now_ns)
        for number in numbers.tolist() if self._buffer else ():
            self._buffer.pop(number, None)

    def _keep(self, offset: int, data: bytes) -> None:
        page, done = self.page_bytes, 0
        while done < len(data):
            number, inside = divmod(offset + done, page)
            part = data[done : done + page - inside]
            if len(part) < page:
                whole = self._pages(number, number + 1)
                part = whole[:inside] + part + whole[inside + len(part) :]
            self._buffer[number] = part
            done += page - inside
        if len(self._buffer) >= BUFFER_PAGES:
            self._destage()

    def flush(self) -> None:
        """Program what waits, and record it."""
        with self._lock:
            start_ns = self._now_ns
            self._destage()
            self._now_ns = self._firmware.ftl.flush(self._now_ns)
            self._done("flush", 0, start_ns)

    def _done(self, kind: str, nbytes: int, start_ns: int) -> None:
        """A request has been carried out: for the latencies, and for the health of the drive."""
        took_ns, counters = self._now_ns - start_ns, self._firmware.ftl.counters
        self.latency[kind].add(nbytes, took_ns)
        counters.host_reads += kind == "read"
        counters.host_writes += kind == "write"
        counters.busy_ns += took_ns

    def _pages(self, first: int, last: int) -> bytes:
        """Pages as they are at present."""
        start_ns, buffer, blocks = self._now_ns, self._buffer, self._firmware.ftl.blocks
        if last == first + 1:
            content = buffer.get(first)
            if content is None:
                content, self._now_ns = blocks.read_page(first, start_ns)
        else:
            flash = [number for number in range(first, last) if number not in buffer]
            rows, self._now_ns = blocks.read(np.array(flash, np.int64), start_ns)
            if len(flash) == last - first:
                content = rows.tobytes()
            else:
                found = dict(zip(flash, rows, strict=True))
                content = b"".join(buffer.get(number) or found[number].tobytes() for number in range(first, last))
        return content

    def _destage(self) -> None:
        """Program the buffer's pages; they stay in it where the flash has no room."""
        if self._buffer:
            numbers = np.fromiter(self._buffer, np.int64, len(self._buffer))
            self._program(numbers, b"".join(self._buffer.values()))

    def _link_ns(self, nbytes: int) -> int:
        link = self._firmware.spec.link
        return link.command_ns + link.transfer_ns(nbytes)
