"""Block namespace as bytes: a write buffer in drive DRAM on top of the conventional mapping."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager

import numpy as np

from csd_firmware.logs import Latency, namespace_pages
from csd_firmware.step import Firmware
from csd_spec.arrays import I64

LARGE_PAGES = 16
BUFFER_PAGES = 512  # pages that are being programmed while others are accepted
PAGES_PER_LANE = 8  # pages of a lane that are programmed together, and then free their part of the buffer


class Namespace:
    """Reads and writes of any offset and size.

    A write is complete when it is in the buffer, which accepts it as soon as earlier programs have freed space; `flush`
    makes it durable. Every request takes the simulated time of its submission, ns, and returns when it has ended. Times
    ascend; None submits it at the drive's clock, when all earlier requests have ended. Overlapping requests share the
    flash, and take turns on each direction of the link. Changes raise MediaFailedError on a failed drive, and an
    unexpected error in them fails the drive.
    """

    def __init__(self, firmware: Firmware, lock: AbstractContextManager[object]) -> None:
        self._firmware, self._lock = firmware, lock
        blocks, geometry = firmware.ftl.blocks, firmware.spec.geometry
        self.page_bytes = geometry.page_bytes
        blocks.resize(namespace_pages(firmware.ftl))
        self.size_bytes = blocks.pages * self.page_bytes
        self._batch = min(BUFFER_PAGES, PAGES_PER_LANE * geometry.lanes)
        self._buffer: dict[int, bytes] = {}  # logical page -> content
        self._programs: deque[tuple[int, int]] = deque()  # programs that may be running: end (ns), pages

    @property
    def latency(self) -> dict[str, Latency]:
        """Simulated latency since power-on, by kind of request."""
        by_kind = self._firmware.state.history.latency
        return {kind: by_kind.get(f"Block{kind.title()}", Latency()) for kind in ("read", "write", "flush", "discard")}

    @property
    def free_bytes(self) -> int:
        """Bytes of pages that are not mapped to flash."""
        return self.size_bytes - self._firmware.ftl.blocks.mapped * self.page_bytes

    def read(self, offset: int, size: int, submit_ns: int | None = None) -> tuple[bytes, int]:
        """Return at most `size` bytes (fewer at the end of the namespace), and when they have crossed the link, ns."""
        with self._lock:
            start_ns, page = self._start_ns(submit_ns), self.page_bytes
            size = max(0, min(size, self.size_bytes - offset))
            if not size:
                return b"", start_ns
            end = offset + size
            first, last = offset // page, -(-end // page)
            data, ready_ns = self._pages(first, last, start_ns)
            finish_ns = self._firmware.cross_link("out", size, ready_ns) + self._command_ns
            self._firmware.record("BlockRead", start_ns, finish_ns, reads=True, nbytes=size)
        return data if len(data) == size else data[offset - first * page : end - first * page], finish_ns

    def write(self, offset: int, data: bytes, submit_ns: int | None = None) -> tuple[int, int]:
        """Buffer the data that fits the namespace; returns the number of bytes, and when they are in the buffer, ns."""
        with self._lock, self._firmware.failing("write"):
            start_ns, page = self._start_ns(submit_ns), self.page_bytes
            data = data[: max(0, self.size_bytes - offset)]
            now_ns = self._firmware.cross_link("in", len(data), self._room_ns(start_ns)) + self._command_ns
            if len(data) >= LARGE_PAGES * page and not (offset % page or len(data) % page):
                numbers = np.arange(offset // page, (offset + len(data)) // page)
                now_ns = self._program(numbers, data, now_ns)
            else:
                now_ns = self._buffer_bytes(offset, data, now_ns)
            self._firmware.record("BlockWrite", start_ns, now_ns, writes=True, nbytes=len(data))
        return len(data), now_ns

    def discard(self, offset: int, size: int, submit_ns: int | None = None) -> int:
        """Zero bytes, and unmap whole pages; see `BlockNamespace.discard`. Returns when that is done, ns."""
        end, page = min(offset + size, self.size_bytes), self.page_bytes
        first, last = -(-offset // page), end // page
        with self._lock, self._firmware.failing("discard"):
            start_ns = self._start_ns(submit_ns)
            now_ns = start_ns + self._command_ns
            edge = min(first * page, end)
            for at, until in ((offset, edge), (max(last * page, edge), end)):
                now_ns = self._buffer_bytes(at, bytes(max(0, until - at)), now_ns)
            if first < last:
                self._firmware.ftl.blocks.discard(first, last - first)
                for number in [number for number in self._buffer if first <= number < last]:
                    del self._buffer[number]
            self._firmware.record("BlockDiscard", start_ns, now_ns, nbytes=max(0, end - offset))
        return now_ns

    def flush(self, submit_ns: int | None = None) -> int:
        """Program the buffer, and make it durable; returns when it is, ns."""
        with self._lock, self._firmware.failing("flush"):
            start_ns = self._start_ns(submit_ns)
            finish_ns = self._firmware.ftl.flush(self._destage(start_ns))
            self._firmware.record("BlockFlush", start_ns, finish_ns)
        return finish_ns

    @property
    def _command_ns(self) -> int:
        return self._firmware.spec.link.command_ns

    def _start_ns(self, submit_ns: int | None) -> int:
        """Submission time of a request whose turn has come, ns."""
        return self._firmware.now_ns if submit_ns is None else submit_ns

    def _program(self, numbers: I64, data: bytes, now_ns: int) -> int:
        """Program pages in the background; returns when the last ones are handed over, ns.

        Large writes bypass the buffer at the same speed.
        """
        pages = np.frombuffer(data, np.uint8).reshape(-1, self.page_bytes)
        assert pages.shape[0] == numbers.size, f"{pages.shape[0]} pages of data for {numbers.size} pages"
        for at in range(0, numbers.size, self._batch):
            part = slice(at, at + self._batch)
            now_ns = self._room_ns(now_ns)
            ends_ns = self._firmware.ftl.blocks.write(numbers[part], pages[part], now_ns)
            self._programs.append((ends_ns, numbers[part].size))
        while self._programs and self._programs[0][0] <= now_ns:
            self._programs.popleft()
        for number in numbers.tolist() if self._buffer else ():
            self._buffer.pop(number, None)
        return now_ns

    def _room_ns(self, now_ns: int) -> int:
        """When programs have freed enough of the buffer for another request, ns."""
        waiting = sum(pages for _, pages in self._programs)
        for ends_ns, pages in self._programs:
            if waiting <= BUFFER_PAGES:
                break
            now_ns, waiting = max(now_ns, ends_ns), waiting - pages
        return now_ns

    def _buffer_bytes(self, offset: int, data: bytes, now_ns: int) -> int:
        """Buffer bytes; returns when the rest of partially written pages has been read, and there was room, ns."""
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
        return self._destage(now_ns) if len(self._buffer) >= self._batch else now_ns

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
                by_number = dict(zip(flash, rows, strict=True))
                content = b"".join(buffer.get(number) or by_number[number].tobytes() for number in range(first, last))
        assert len(content) == (last - first) * self.page_bytes and ready_ns >= start_ns
        return content, ready_ns

    def _destage(self, now_ns: int) -> int:
        """Program the buffer's pages; they stay buffered if flash is full. Returns when they are handed over, ns."""
        if self._buffer:
            numbers = np.fromiter(self._buffer, np.int64, len(self._buffer))
            now_ns = self._program(numbers, b"".join(self._buffer.values()), now_ns)
        return now_ns
