"""Computational drives as a tier: KV data is copied there and back by ranges of tokens, or attended there."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from csd_spec import DriveError
from csd_spec.arrays import F16, F32
from host_driver.batch import Batch, MicroBatch
from host_driver.driver import Driver
from host_driver.kv_format import KVFormat
from kv_cache.block_table import BlockKey

ALL = slice(None)


class DriveTier:
    """Tier with a sequence in drives for each KV block; a layer of the sequence is a frame.

    A token's bytes are one row of the format. Drives store values with as many channels as keys: values are padded with
    zeros when they are written, and cut when they are read. One thread at a time uses the drives.
    """

    def __init__(self, driver: Driver, kv_format: KVFormat, max_tokens: int) -> None:
        self.driver, self.format, self.max_tokens = driver, kv_format, max_tokens
        self.batches: dict[tuple[Hashable, int], Batch] = {}
        self.lock = threading.Lock()
        self._step: MicroBatch | None = None

    def frame(self, block: BlockKey, nbytes: int) -> DriveFrame:
        with self.lock:
            return DriveFrame(self, block, self._batch(block.request, block.index))

    def _batch(self, request: Hashable, block: int) -> Batch:
        """Sequence of a block; created at the first use."""
        if (request, block) not in self.batches:
            self.batches[request, block] = self.driver.create(1, self.max_tokens)
        return self.batches[request, block]

    def forget(self, request: Hashable) -> None:
        for key in [key for key in self.batches if key[0] == request]:
            with self.lock, suppress(DriveError):
                self.driver.free(self.batches.pop(key))

    def close(self) -> None:
        for request, _ in list(self.batches):
            self.forget(request)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A decode step, whose layers follow each other in the drives' simulated time."""
        with ExitStack() as step:
            with self.lock:
                (self._step,) = step.enter_context(self.driver.step(1))
            try:
                yield
            finally:
                self._step = None
            with self.lock:  # a copy of another thread must not move the time at which the step ends
                step.close()

    def attend(self, requests: Sequence[Hashable], block: int, layer: int, q: F16, k: F16, v: F16) -> tuple[F16, F32]:
        """Store one token per request in this block and attend to the block, as `Driver.attend` does.

        Args:
            requests: Requests, R of them.
            block: Index of the block, the last one of each request.
            layer: Layer index.
            q: Queries (R, q_heads, k_channels), as bits of the format's dtype.
            k: Keys (R, kv_heads, k_channels), likewise.
            v: Values (R, kv_heads, v_channels), likewise; ignored with latent attention.

        Returns:
            Output (R, q_heads, v_channels), with latent attention k_channels; m and l of each head (R, q_heads, 2).
        """
        assert self._step is not None, "outside of a step"
        with self.lock:
            batches = [self._batch(request, block) for request in requests]
        together = Batch(
            [np.concatenate(handles) for handles in zip(*(batch.handles for batch in batches), strict=True)],
            np.concatenate([batch.lengths for batch in batches]),
        )
        with self.lock:
            out, sums = self.driver.attend(together, ALL, self._step, layer, q, k, self.padded(v))
        assert len(batches) == len(together.lengths) == len(requests)
        for batch, lengths in zip(batches, together.lengths, strict=True):
            batch.lengths[0] = lengths
        return (out if self.format.latent else out[..., : self.format.v_channels]), sums

    def padded(self, v: F16) -> F16:
        """Pad values (tokens, kv_heads, v_channels) to the number of channels that drives store."""
        if self.format.v_channels in (0, self.format.k_channels):
            return v
        return np.pad(v, ((0, 0), (0, 0), (0, self.format.k_channels - self.format.v_channels)))


class DriveFrame:
    """A layer of a sequence in drives."""

    def __init__(self, owner: DriveTier, block: BlockKey, batch: Batch) -> None:
        self._owner, self._key, self._batch, self._layer = owner, (block.request, block.index), batch, block.layer
        self._format, self._row_bytes = owner.format, owner.format.row_bytes

    def view(self, at: int, nbytes: int) -> None:
        return None

    def load(self, at: int, into: memoryview) -> None:
        first, tokens = self._range(at, into)
        assert first + tokens <= self._batch.lengths[0, self._layer], "tokens that are not stored are read"
        with self._owner.lock:
            stored = self._owner.driver.read(self._batch, ALL, self._layer, first, tokens)
        for target, rows in zip(self._format.split(np.frombuffer(into, np.float16)), stored, strict=True):
            target[:] = rows[..., : target.shape[-1]]

    def store(self, at: int, data: memoryview) -> None:
        first, tokens = self._range(at, data)
        k, v = self._format.split(np.frombuffer(data, np.float16))
        driver = self._owner.driver
        assert first <= self._batch.lengths[0, self._layer], "tokens would be stored after a gap"
        with self._owner.lock:
            if first < self._batch.lengths[0, self._layer]:
                driver.crop(self._batch, self._layer, np.array([first]))
            driver.append(self._batch, ALL, self._layer, np.array([tokens]), lambda: (k, self._owner.padded(v)))
            driver.await_append()

    def trim(self, nbytes: int) -> None:
        with suppress(DriveError), self._owner.lock:
            self._owner.driver.crop(self._batch, self._layer, np.array([-(-nbytes // self._row_bytes)]))

    def free(self) -> None:
        if self._owner.batches.get(self._key) is self._batch:  # else its sequence is freed as a whole
            self.trim(0)

    def _range(self, at: int, data: memoryview) -> tuple[int, int]:
        """First token and number of tokens of a byte range."""
        first, rest = divmod(at, self._row_bytes)
        tokens, more = divmod(len(data), self._row_bytes)
        if rest or more:
            raise ValueError(f"bytes {at} to {at + len(data)}: must be whole tokens of {self._row_bytes} bytes")
        return first, tokens
