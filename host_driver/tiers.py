"""K and V of a model in tiers: a table and a policy for all that is cached, and an iteration for each forward."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from csd_io.direct import open_queue
from csd_io.queue import aligned
from host_driver.hf.staging import side_stream
from kv_cache.block_table import BlockKey, PolicyError
from kv_cache.hardware import DEVICE, DIRECT, HOST, PAGE_CACHE, Machine
from kv_cache.iteration import IterationRunner
from kv_cache.limits import BLOCK_BYTES, TierLimits
from kv_cache.replay import replay
from kv_cache.scheduler import Policy
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.frames import CachedFiles, DirectBlocks, Memory, Store
from kv_cache.transfer.policy_thread import PolicyThread
from kv_cache.transfer.real import RealTransfers
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

DEVICE_STEPS = 16  # in which a frame on a GPU reaches its full length


@dataclass(frozen=True, slots=True)
class Shape:
    """Room for K, or for V, of one token of a layer: (B, H, d), and its dtype."""

    rows: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a token of a batch."""
        return math.prod(self.rows) * self.dtype.itemsize


class DeviceFrame:
    """Memory of a GPU, reached by way of the host on a stream of its own, behind what the model has computed so far.

    A GPU does not give pages when written, so it is taken in steps: a new one, to which what was there is copied. Steps
    are whole blocks: what reads in blocks finds them there.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._limit, self._device = nbytes, device
        self._bytes: torch.Tensor | None = None

    def first(self, nbytes: int) -> torch.Tensor:
        """The first bytes, so many, which are there from now on."""
        before = self._bytes
        if before is None or len(before) < nbytes:
            step = in_blocks(-(-self._limit // DEVICE_STEPS))
            size = min(self._limit, -(-nbytes // step) * step)
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
            if before is not None:
                self._bytes[: len(before)] = before
        assert self._bytes is not None
        return self._bytes[:nbytes]

    def view(self, at: int, nbytes: int) -> None:
        return None

    def load(self, at: int, into: memoryview) -> None:
        self._copy(self.first(at + len(into))[at:], torch.frombuffer(into, dtype=torch.uint8))

    def store(self, at: int, data: memoryview) -> None:
        self._copy(torch.frombuffer(data, dtype=torch.uint8), self.first(at + len(data))[at:])

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
            self._bytes = self._bytes[: in_blocks(nbytes)].clone()

    def free(self) -> None:
        self._bytes = None


def bounce_of(device: torch.device) -> Callable[[int], memoryview]:
    """What makes host memory for copies to and from a device: for a GPU such that it reaches by itself."""

    def pinned(nbytes: int) -> memoryview:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data

    return aligned if device.type == "cpu" else pinned


class DeviceMemory(Memory):
    """Frames on the model's device. For the CPU that is this process's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def frame(self, block: BlockKey, nbytes: int) -> Any:
        return super().frame(block, nbytes) if self.device.type == "cpu" else DeviceFrame(nbytes, self.device)


def first_bytes(frame: Any, nbytes: int) -> torch.Tensor:
    """The first bytes of a frame on the device, to be read and written, (nbytes,) uint8."""
    if isinstance(frame, DeviceFrame):
        return frame.first(nbytes)
    return torch.frombuffer(frame.buffer, dtype=torch.uint8)[:nbytes]


def stores(tiers: TierLimits, device: torch.device, files: CachedFiles) -> dict[str, Store]:
    """What holds the bytes at each tier. files: those behind the page cache."""
    if tiers.on_device:
        assert tiers.files is not None
        direct = DirectBlocks(open_queue(tiers.files, force=tiers.force))
    else:
        direct = DirectBlocks(open_file=lambda nbytes: open_queue(tiers.folder, nbytes))
    return {DEVICE: DeviceMemory(device), HOST: Memory(), PAGE_CACHE: files, DIRECT: direct}


class TieredKv:
    """What an attach with tiers has made.

    layers: of the model. cache_bytes: what the page cache may keep. training: whether the model is.
    """

    def __init__(
        self,
        tiers: TierLimits,
        policy: Policy,
        cache_bytes: int,
        layers: int,
        model: torch.nn.Module,
        max_tokens: int,
        record: bool = False,
    ) -> None:
        self.tiers, self.layers, self.max_tokens = tiers, layers, max_tokens
        self.device = next(model.parameters()).device
        self.training: Callable[[], bool] = lambda: model.training
        self.machine: Machine = tiers.machine(cache_bytes)
        self._policy = policy
        self._shapes: dict[Hashable, Shape] = {}
        self._policy_thread = PolicyThread()
        self._running: Hashable | None = None
        self._lock = threading.Lock()
        self._home = threading.get_ident()  # the thread that was alone last
        self._holder: int | None = None
        self._over: list[Hashable] = []  # dropped, not yet freed
        self._closed = False
        self.files = CachedFiles(tiers.folder)
        held = stores(tiers, self.device, self.files)
        self.real = RealTransfers(held, self._capacity, self._policy_thread.attends, bounce_of(self.device))
        self.runner = IterationRunner(
            self.machine,
            range(layers),
            policy.layers,
            self.real,
            final_tokens=max_tokens,
            recorded=[] if record else None,
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One thread at a time has a forward, or crops; the others wait. Frees what was dropped meanwhile."""
        if self._holder == threading.get_ident():
            raise PolicyError("K and V in tiers are at rest between forwards, and this thread is in the middle of one")
        with self._lock:
            self._holder = self._home = threading.get_ident()
            try:
                self._free_dropped()
                yield
            finally:
                try:
                    self._free_dropped()
                finally:
                    self._holder = None

    def open(self, request: Hashable, shape: Shape) -> None:
        """A batch whose K and V are of this shape; raises PolicyError where they cannot become as long as was said."""
        self._check_device(shape, self.tiers.max_tokens or 1)
        self._shapes[request] = shape

    def reach(self, request: Hashable, layer: int, new: int) -> None:
        """The model is at a layer's attention, with so many new tokens; returns when K and V are on the device."""
        shape = self._shapes[request]
        if layer == 0:
            if self._running is not None:
                raise PolicyError("the model stores K and V in layer 0 twice in a forward")
            length = self._length(request) + new
            if length > self.max_tokens:
                raise PolicyError(
                    f"{length} tokens: tiers were made for {self.max_tokens}: give TierLimits(max_tokens=...)"
                )
            self._check_device(shape, length)
            self._running = request
            iteration, rows = {request: new}, {request: shape.row_bytes}
            self._said(lambda: self._policy_thread.start(lambda: self.runner.run(iteration, rows)))
        elif self._running != request:
            raise PolicyError(f"the model's first layer to attend was not layer 0, but layer {layer}")
        attention = self._said(lambda: self._policy_thread.reach(layer))
        assert isinstance(attention, AttendCall)
        if attention.tiers != (DEVICE,):
            raise PolicyError(
                f"the policy attends at {', '.join(attention.tiers)}: K and V in tiers are attended on the device"
            )
        if attention.rows != (request,):
            raise PolicyError("the policy attends to nobody: the model attends to its batch")
        if attention.method != "dense":
            raise PolicyError(f"the policy attends by {attention.method!r}: in tiers the model attends itself")

    def device_rows(self, block: BlockKey, tokens: int) -> torch.Tensor:
        """The first tokens of K or V on the device, (tokens, B, H, d), to be read and written."""
        shape = self._shapes[block.request]
        flat = first_bytes(self.real.frame(block, DEVICE), tokens * shape.row_bytes)
        return flat.view(shape.dtype).view(tokens, *shape.rows)

    def rewrite(self, block: BlockKey) -> None:
        """The rows of what is attended now stand in another order."""
        self.runner.rewrite(block, DEVICE)

    def finish(self) -> None:
        """The forward is over."""
        if self._running is not None:
            self._running = None
            self._said(self._policy_thread.finish)

    def abandon(self) -> None:
        """The forward has failed."""
        self._running = None
        self.runner.abandon()
        self._policy_thread.abandon()

    def crop(self, block: BlockKey, tokens: int) -> None:
        """Keep the first tokens of a block."""
        with self.alone():
            self.real.settle()
            self.runner.crop(block, tokens)
            self.real.crop(block, tokens * self._shapes[block.request].row_bytes)

    def free(self, request: Hashable) -> None:
        """Forget a batch: at once, or before the next forward.

        It is the collector of garbage who calls this, at any time and in any thread, in one that copies too: that one
        must not wait for copies.
        """
        self._over.append(request)
        if threading.get_ident() == self._home and self._lock.acquire(blocking=False):
            try:
                self._free_dropped()
            finally:
                self._lock.release()

    def _free_dropped(self) -> None:
        while self._over:
            request = self._over.pop()
            if not self._closed and request in self._shapes:
                self.real.settle()
                self.runner.free(request)
                self.real.forget(request)
                del self._shapes[request]

    def close(self) -> None:
        """Let what is under way end, and free everything."""
        with self.alone():
            self._closed = True
            self.real.close()

    def modelled_bytes(self) -> dict[str, int] | None:
        """Bytes by path when the recorded choices are carried out in modelled time; None where none are."""
        modelled = SimulatedTransfers(self.machine, lambda attention: LayerTime(0))
        run = self.runner
        if run.recorded is None:
            return None
        replay(run.recorded, self.machine, modelled, run)
        modelled.settle()
        return dict(modelled.moved)

    def _check_device(self, shape: Shape, tokens: int) -> None:
        """Raise PolicyError where K and V of a layer are more than the device may hold: no policy could attend them."""
        limit, need = self.tiers.device, 2 * shape.row_bytes * tokens
        if limit is not None and need > limit:
            raise PolicyError(
                f"device = {limit:,} bytes: K and V of one layer take {need:,} at {tokens:,} tokens of "
                f"{shape.rows[0]} sequences: give it more"
            )

    def _length(self, request: Hashable) -> int:
        entry = self.runner.table.entries.get(BlockKey(request, 0, "k"))
        return entry.tokens if entry else 0

    def _capacity(self, block: BlockKey) -> int:
        return in_blocks(self.max_tokens * self._shapes[block.request].row_bytes)

    def _said(self, call: Callable[[], Any]) -> Any:
        """What the policy does; whatever it raises is one clear error."""
        try:
            return call()
        except (OSError, PolicyError):
            raise
        except Exception as error:
            raise PolicyError(f"policy {self._policy.name}: {type(error).__name__}: {error}") from error


def in_blocks(nbytes: int) -> int:
    """So many bytes and what fills the last block."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
