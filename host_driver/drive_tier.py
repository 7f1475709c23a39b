"""Computational drives as a tier: KV data is copied there and back by ranges of tokens, or attended there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import numpy as np

from csd_spec import DriveError
from csd_spec.arrays import F16, F32, I64
from host_driver.batch import Batch, MicroBatch
from host_driver.driver import Driver
from host_driver.first_steps import Rows
from host_driver.kv_format import KVFormat
from kv_cache.block_table import BlockKey

ALL = slice(None)


class DriveTier:
    """Tier with a sequence in drives for each KV block; a layer of the sequence is a frame.

    A token's bytes are one row of the format. Drives store values with as many channels as keys: values are padded with
    zeros when they are written, and cut when they are read. One thread at a time uses the drives.

    Attributes:
        sequences: Batch and row of the sequence of each block of a request.
    """

    def __init__(self, driver: Driver, kv_format: KVFormat, max_tokens: int) -> None:
        self.driver, self.format, self.max_tokens = driver, kv_format, max_tokens
        self.sequences: dict[tuple[Hashable, int], tuple[Batch, int]] = {}
        self.lock = threading.Lock()

    def create(self, requests: Sequence[Hashable], block: int = 0) -> Batch:
        """Create the sequences of a block of several requests, together."""
        batch = self.driver.create(len(requests), self.max_tokens)
        self.sequences |= {(request, block): (batch, row) for row, request in enumerate(requests)}
        return batch

    def _sequence(self, request: Hashable, block: int) -> tuple[Batch, int]:
        """Sequence of a block; created at the first use."""
        if (request, block) not in self.sequences:
            self.create([request], block)
        return self.sequences[request, block]

    @contextmanager
    def together(self, requests: Sequence[Hashable], block: int = 0) -> Iterator[tuple[Batch, Rows]]:
        """Sequences of a block of several requests as rows of one batch."""
        sequences = [self._sequence(request, block) for request in requests]
        first = sequences[0][0]
        if all(batch is first for batch, _ in sequences):
            rows = [row for _, row in sequences]
            yield first, ALL if rows == list(range(len(first.lengths))) else np.array(rows)
            return
        joined = Batch(
            [
                np.array([handles[row] for handles, (_, row) in zip(of_drive, sequences, strict=True)])
                for of_drive in zip(*(batch.handles for batch, _ in sequences), strict=True)
            ],
            np.stack([batch.lengths[row] for batch, row in sequences]),
        )
        yield joined, ALL
        # the driver counts tokens in the batch that it is given
        for (batch, row), lengths in zip(sequences, joined.lengths, strict=True):
            batch.lengths[row] = lengths

    def frame(self, block: BlockKey, nbytes: int) -> DriveFrame:
        with self.lock:
            return DriveFrame(self, block, *self._sequence(block.request, block.index))

    def forget(self, request: Hashable) -> None:
        self.free([request])

    def free(self, requests: Collection[Hashable]) -> None:
        """Free the sequences of requests on the drives that still respond."""
        rows: dict[int, list[tuple[Batch, int]]] = {}
        for key in [key for key in self.sequences if key[0] in requests]:
            batch, row = self.sequences.pop(key)
            rows.setdefault(id(batch), []).append((batch, row))
        with self.lock:
            for freed in rows.values():
                batch, numbers = freed[0][0], np.array([row for _, row in freed])
                with suppress(Exception):  # of tokens in flight, in a forward that has failed
                    self.driver.settle()
                with suppress(DriveError):
                    self.driver.free(Batch([handles[numbers] for handles in batch.handles], batch.lengths[numbers]))

    def close(self) -> None:
        self.free({request for request, _ in self.sequences})

    @contextmanager
    def step(self, count: int = 1) -> Iterator[list[MicroBatch]]:
        """A decode step in micro-batches, whose layers follow each other in the drives' simulated time."""
        if count > 1:  # nothing is copied meanwhile
            with self.lock, self.driver.step(count) as micro_batches:
                yield micro_batches
            return
        with ExitStack() as step:
            with self.lock:
                micro_batches = step.enter_context(self.driver.step(1))
            yield micro_batches
            with self.lock:  # a copy of another thread must not move the time at which the step ends
                step.close()

    def append(
        self, requests: Sequence[Hashable], layer: int, lengths: I64, load: Callable[[], tuple[F16, F16]]
    ) -> None:
        """Store new tokens of the first block of requests in the background, as `Driver.append` does."""
        with self.lock, self.together(requests) as (batch, rows):
            self.driver.append(batch, rows, layer, lengths, load)

    def attend_block(
        self, requests: Sequence[Hashable], block: int, micro_batch: MicroBatch, layer: int, q: F16, k: F16, v: F16
    ) -> tuple[F16, F32]:
        """Store one token per request in this block and attend to the block, as `Driver.attend` does.

        Args:
            requests: Requests, R of them.
            block: Index of the block, the last one of each request.
            micro_batch: Part of a decode step.
            layer: Layer index.
            q: Queries (R, q_heads, k_channels), as bits of the format's dtype.
            k: Keys (R, kv_heads, k_channels), likewise.
            v: Values (R, kv_heads, v_channels), likewise; ignored with latent attention.

        Returns:
            Output (R, q_heads, v_channels), with latent attention k_channels; m and l of each head (R, q_heads, 2).
        """
        lock = self.lock if micro_batch.order is None else nullcontext()  # else the step has it
        with lock, self.together(requests, block) as (batch, rows):
            out, sums = self.driver.attend(batch, rows, micro_batch, layer, q, k, self.padded(v))
        return (out if self.format.latent else out[..., : self.format.v_channels]), sums

    def read(self, requests: Sequence[Hashable], layer: int) -> list[tuple[F16, F16]]:
        """Read back keys and values of a layer of the first block of requests, (S, kv_heads, channels) of each."""
        with self.lock, self.together(requests) as (batch, rows):
            k, v = self.driver.read(batch, rows, layer)
            ends = np.cumsum(batch.lengths[rows, layer])[:-1]
        return list(zip(np.split(k, ends), np.split(v[..., : self.format.v_channels], ends), strict=True))

    def crop(self, layer: int, tokens: Mapping[Hashable, int]) -> None:
        """Keep the first tokens of a layer of requests whose sequence is longer."""
        wanted = {
            request: count
            for request, count in tokens.items()
            if (request, 0) in self.sequences and self._stored(request, layer) > count
        }
        if wanted:
            with self.lock, self.together(list(wanted)) as (batch, rows):
                self.driver.crop(batch, rows, layer, np.array(list(wanted.values()), np.int64))

    def _stored(self, request: Hashable, layer: int) -> int:
        batch, row = self.sequences[request, 0]
        return int(batch.lengths[row, layer])

    def padded(self, v: F16) -> F16:
        """Pad values (tokens, kv_heads, v_channels) to the number of channels that drives store."""
        if self.format.v_channels in (0, self.format.k_channels):
            return v
        return np.pad(v, ((0, 0), (0, 0), (0, self.format.k_channels - self.format.v_channels)))


class DriveFrame:
    """A layer of a sequence in drives."""

    def __init__(self, owner: DriveTier, block: BlockKey, batch: Batch, row: int) -> None:
        self._owner, self._key, self._layer = owner, (block.request, block.index), block.layer
        self._batch, self._row, self._rows = batch, row, np.array([row])
        self._format, self._row_bytes = owner.format, owner.format.row_bytes

    @property
    def _tokens(self) -> int:
        return int(self._batch.lengths[self._row, self._layer])

    def view(self, at: int, nbytes: int) -> None:
        return None

    def load(self, at: int, into: memoryview) -> None:
        first, tokens = self._range(at, into)
        assert first + tokens <= self._tokens, "tokens that are not stored are read"
        with self._owner.lock:
            stored = self._owner.driver.read(self._batch, self._rows, self._layer, first, tokens)
        for target, rows in zip(self._format.split(np.frombuffer(into, np.float16)), stored, strict=True):
            target[:] = rows[..., : target.shape[-1]]

    def store(self, at: int, data: memoryview) -> None:
        first, tokens = self._range(at, data)
        k, v = self._format.split(np.frombuffer(data, np.float16))
        driver = self._owner.driver
        assert first <= self._tokens, "tokens would be stored after a gap"
        with self._owner.lock:
            if first < self._tokens:
                driver.crop(self._batch, self._rows, self._layer, np.array([first]))
            driver.append(self._batch, self._rows, self._layer, np.array([tokens]), lambda: (k, self._owner.padded(v)))
            driver.await_append()

    def trim(self, nbytes: int) -> None:
        tokens = -(-nbytes // self._row_bytes)
        with suppress(DriveError), self._owner.lock:
            if self._tokens > tokens:
                self._owner.driver.crop(self._batch, self._rows, self._layer, np.array([tokens]))

    def free(self) -> None:
        if self._owner.sequences.get(self._key) == (self._batch, self._row):  # else its sequence is freed as a whole
            self.trim(0)

    def _range(self, at: int, data: memoryview) -> tuple[int, int]:
        """First token and number of tokens of a byte range."""
        first, rest = divmod(at, self._row_bytes)
        tokens, more = divmod(len(data), self._row_bytes)
        if rest or more:
            raise ValueError(f"bytes {at} to {at + len(data)}: must be whole tokens of {self._row_bytes} bytes")
        return first, tokens
