"""KV data of an attached model in tiers: a block table and a policy for all caches, an iteration for each forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from csd_io.direct import open_queue
from csd_io.queue import aligned
from host_driver.exclusive import Exclusive
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

DEVICE_STEPS = 16  # allocation steps in which a frame on a GPU reaches its full size


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the keys, or values, of one token of a layer: (B, H, d) and dtype."""

    rows: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes per token of a batch."""
        return math.prod(self.rows) * self.dtype.itemsize


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


class TieredKv:
    """KV data of a model that is attached with tiers.

    Args:
        tiers: Limits.
        policy: The policy.
        cache_bytes: Size of the page cache, bytes.
        layers: Number of the model's layers in tiers.
        model: The model.
        max_tokens: Maximum length of a sequence.
        record: Record all actions, for `simulated_bytes`.
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
        self.policy = policy
        self._shapes: dict[Hashable, Shape] = {}
        self._policy_thread = PolicyThread()
        self._running: Hashable | None = None
        self.access = Exclusive(self._free, "in tiers")
        self._closed = False
        self.files = CachedFiles(tiers.folder)
        held = stores(tiers, self.device, self.files)
        self.real = RealTransfers(
            held, self._capacity, self._policy_thread.attend_layer, bounce_buffer_factory(self.device)
        )
        self.runner = IterationRunner(
            self.machine,
            range(layers),
            policy.layers,
            self.real,
            final_tokens=max_tokens,
            recorded=[] if record else None,
        )

    def open(self, request: Hashable, shape: Shape) -> None:
        """Add a batch of this shape; raises PolicyError if a layer of it cannot fit on the device."""
        self._check_device(shape, self.tiers.max_tokens or 1)
        self._shapes[request] = shape

    def enter_layer(self, request: Hashable, layer: int, new: int) -> None:
        """Called at a layer's attention with `new` tokens; returns when its KV data is on the device."""
        shape = self._shapes[request]
        if layer == 0:
            if self._running is not None:
                raise PolicyError("the model stores keys and values in layer 0 twice in a forward")
            length = self._length(request) + new
            if length > self.max_tokens:
                raise PolicyError(
                    f"{length} tokens: must be at most max_tokens = {self.max_tokens}: raise it with "
                    "TierLimits(max_tokens=...)"
                )
            self._check_device(shape, length)
            self._running = request
            iteration, rows = {request: new}, {request: shape.row_bytes}
            self._run_policy(lambda: self._policy_thread.start(lambda: self.runner.run(iteration, rows)))
        elif self._running != request:
            raise PolicyError(f"the model's first attention in a forward is in layer {layer}: must be layer 0")
        attention = self._run_policy(lambda: self._policy_thread.enter_layer(layer))
        assert isinstance(attention, AttendCall)
        if attention.tiers != (DEVICE,):
            raise PolicyError(
                f"the policy attends at {', '.join(attention.tiers)}: without drives only the device can attend"
            )
        if attention.rows != (request,):
            raise PolicyError("the policy attends to no request of the batch: attend to all of them")
        if attention.method != "dense":
            raise PolicyError(f"the policy attends with method {attention.method!r}: in tiers only 'dense' works")

    def device_rows(self, block: BlockKey, tokens: int) -> torch.Tensor:
        """The first tokens of keys or values on the device, (tokens, B, H, d), as a writable view."""
        shape = self._shapes[block.request]
        flat = first_bytes(self.real.frame(block, DEVICE), tokens * shape.row_bytes)
        return flat.view(shape.dtype).view(tokens, *shape.rows)

    def rewrite(self, block: BlockKey) -> None:
        """Tell the policy that the rows of a block were reordered on the device."""
        self.runner.rewrite(block, DEVICE)

    def finish(self) -> None:
        """End a forward."""
        if self._running is not None:
            self._running = None
            self._run_policy(self._policy_thread.finish)

    def abandon(self) -> None:
        """End a failed forward."""
        self._running = None
        self.runner.abandon()
        self._policy_thread.abandon()

    def crop(self, block: BlockKey, tokens: int) -> None:
        """Keep the first tokens of a block."""
        with self.access.hold():
            self.real.settle()
            self.runner.crop(block, tokens)
            self.real.crop(block, tokens * self._shapes[block.request].row_bytes)

    def _free(self, request: Hashable) -> None:
        """Free a batch."""
        if not self._closed and request in self._shapes:
            self.real.settle()
            self.runner.free(request)
            self.real.forget(request)
            del self._shapes[request]

    def close(self) -> None:
        """Wait for transfers in flight and free everything."""
        with self.access.hold():
            self._closed = True
            self.real.close()

    def simulated_bytes(self) -> dict[str, int] | None:
        """Bytes by route of the recorded actions in simulated time; None if not recorded."""
        modelled = SimulatedTransfers(self.machine, lambda attention: LayerTime(0))
        run = self.runner
        if run.recorded is None:
            return None
        replay(run.recorded, self.machine, modelled, run)
        modelled.settle()
        return dict(modelled.moved)

    def _check_device(self, shape: Shape, tokens: int) -> None:
        """Raise PolicyError if one layer does not fit on the device: then no policy could attend it."""
        limit, need = self.tiers.device, 2 * shape.row_bytes * tokens
        if limit is not None and need > limit:
            raise PolicyError(
                f"keys and values of one layer take {need:,} bytes at {tokens:,} tokens of {shape.rows[0]} sequences, "
                f"and the device has {limit:,}: raise its limit (TierLimits.device, --device-kv-mib)"
            )

    def _length(self, request: Hashable) -> int:
        entry = self.runner.table.entries.get(BlockKey(request, 0, "k"))
        return entry.tokens if entry else 0

    def _capacity(self, block: BlockKey) -> int:
        return round_to_blocks(self.max_tokens * self._shapes[block.request].row_bytes)

    def _run_policy(self, call: Callable[[], Any]) -> Any:
        """Run the policy; any exception becomes one PolicyError with its name."""
        try:
            return call()
        except (OSError, PolicyError):
            raise
        except Exception as error:
            raise PolicyError(f"policy {self.policy.name}: {type(error).__name__}: {error}") from error


def round_to_blocks(nbytes: int) -> int:
    """Round up to whole blocks, bytes."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
