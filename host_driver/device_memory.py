"""Memory of the model's device as a tier, and the storage of every tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from csd_io.direct import open_queue
from csd_io.queue import aligned
from host_driver.hf.staging import side_stream
from kv_cache.block_table import BlockKey
from kv_cache.hardware import DEVICE, DIRECT, HOST, PAGE_CACHE
from kv_cache.limits import BLOCK_BYTES, TierLimits
from kv_cache.transfer.frames import CachedFiles, DirectBlocks, Memory, Store

DEVICE_STEPS = 16  # allocation steps in which a frame on a GPU reaches its full size


class DeviceFrame:
    """GPU memory, accessed through the host on a side stream after the model's current work.

    A GPU does not allocate pages on write, so the frame grows in steps: a larger allocation, to which the old one is
    copied. Steps are whole blocks, for readers of whole blocks.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._limit, self._device = nbytes, device
        self._bytes: torch.Tensor | None = None

    def grow(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` bytes; allocates them."""
        before = self._bytes
        if before is None or len(before) < nbytes:
            step = round_to_blocks(-(-self._limit // DEVICE_STEPS))
            size = min(self._limit, -(-nbytes // step) * step)
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
            if before is not None:
                self._bytes[: len(before)] = before
        assert self._bytes is not None
        return self._bytes[:nbytes]

    def view(self, at: int, nbytes: int) -> None:
        return None

    def load(self, at: int, into: memoryview) -> None:
        self._copy(self.grow(at + len(into))[at:], torch.frombuffer(into, dtype=torch.uint8))

    def store(self, at: int, data: memoryview) -> None:
        self._copy(torch.frombuffer(data, dtype=torch.uint8), self.grow(at + len(data))[at:])

    @staticmethod
    def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
        device = source.device if source.is_cuda else target.device
        if device.type == "cpu":
            target.copy_(source)
            return
        side = side_stream(device)
        side.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        side.synchronize()

    def trim(self, nbytes: int) -> None:
        if self._bytes is not None:
            self._bytes = self._bytes[: round_to_blocks(nbytes)].clone()

    def free(self) -> None:
        self._bytes = None


def bounce_buffer_factory(device: torch.device) -> Callable[[int], memoryview]:
    """Allocator of bounce buffers for copies to and from a device: pinned memory for a GPU."""

    def pinned(nbytes: int) -> memoryview:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data

    return aligned if device.type == "cpu" else pinned


class DeviceMemory(Memory):
    """Frames on the model's device; for the CPU, memory of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def frame(self, block: BlockKey, nbytes: int) -> Any:
        return super().frame(block, nbytes) if self.device.type == "cpu" else DeviceFrame(nbytes, self.device)


def first_bytes(frame: Any, nbytes: int) -> torch.Tensor:
    """The first bytes of a frame on the device as a writable view, (nbytes,) uint8."""
    if isinstance(frame, DeviceFrame):
        return frame.grow(nbytes)
    return torch.frombuffer(frame.buffer, dtype=torch.uint8)[:nbytes]


def stores(tiers: TierLimits, device: torch.device, files: CachedFiles) -> dict[str, Store]:
    """Storage of each tier. `files` are the buffered files."""
    if tiers.on_device:
        assert tiers.files is not None
        direct = DirectBlocks(open_queue(tiers.files, allow_overwrite=tiers.allow_overwrite))
    else:
        direct = DirectBlocks(open_file=lambda nbytes: open_queue(tiers.folder, nbytes))
    return {DEVICE: DeviceMemory(device), HOST: Memory(), PAGE_CACHE: files, DIRECT: direct}


def round_to_blocks(nbytes: int) -> int:
    """Round up to whole blocks, bytes."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
