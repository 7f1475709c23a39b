"""Host driver: submits one command per drive and layer to all drives concurrently.

`decode` splits q, k and v by head, submits one command to every drive, waits for all completions and concatenates the
outputs. A prefill is shipped in the background, layer by layer, while the model computes the next layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_link.splitting import SplitRead, check_device, submit_reads
from csd_spec import (
    Attend,
    AttentionConfig,
    Command,
    Completion,
    Drive,
    DriveError,
    Flush,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    ModelShape,
    SeqCreate,
    Status,
)
from csd_spec.arrays import F16, F32, I64
from csd_spec.model import FP16_BYTES
from csd_spec.verbs import VERBS
from host_driver.batch import Batch, MicroBatch, StepObserver
from host_driver.command_order import CommandOrder
from host_driver.first_steps import FirstSteps, Rows
from host_driver.sharding import assign_heads
from host_driver.traffic import Traffic

LAYERS_IN_FLIGHT = 2  # prefill: one layer is written while the next is computed


class Driver:
    """Ships one model's attention to drives. The caller owns the devices and closes them."""

    def __init__(
        self,
        devices: Sequence[Drive],
        shape: ModelShape,
        attention: AttentionConfig = AttentionConfig(),
        flush_interval_steps: int = 0,
    ) -> None:
        """Create a driver.

        Args:
            devices: Connections to the drives.
            shape: Shape of the model.
            attention: Method, budget and layout.
            flush_interval_steps: Decode steps between flushes of the drives; 0: never.

        Raises:
            ValueError: A drive's maximum command size is below the size of one token.
        """
        self.devices, self.shape, self.attention, self.flush_interval_steps = (
            list(devices),
            shape,
            attention,
            flush_interval_steps,
        )
        self.shares = assign_heads(shape, len(devices))
        for device, share in zip(devices, self.shares, strict=True):
            smallest = VERBS[Attend].example(H=len(share.kv_heads), G=share.group, d=shape.head_dim)
            terms = np.zeros((len(share.kv_heads), share.group, 4), np.float32)
            check_device(device, replace(smallest, terms=terms))
        self.bf16 = attention.kv_layout.rows.value == "bf16"  # whether arrays of values hold BF16 bits
        self.traffic = Traffic(busy_ns=[0] * len(devices))
        self.terms: dict[int, F32] = {}  # by layer, if logits are not only scaled: (kv_heads, G, 4), see `Attend`
        self.observer: StepObserver | None = None  # told of each decode step
        self.recorder: FirstSteps | None = None  # dropped after the last recorded step
        self.max_tokens = 1  # of the longest sequence created
        self.now_ns = 0  # simulated time on the host
        here = hasattr(type(self.devices[-1]), "carry_out")  # an attribute forwarded by a wrapper does not count
        self._carry_last = self.devices[-1].carry_out if here else None  # type: ignore[attr-defined]
        self._shipper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefill")
        self._in_flight: deque[Future[list[Future[Completion]]]] = deque()
        self._closed = False

    def create(self, count: int, max_tokens: int) -> Batch:
        """Create `count` sequences on every drive."""
        s, code = self.shape, self.attention.kv_layout.code
        self.max_tokens = max(self.max_tokens, max_tokens)
        if self.recorder:
            self.recorder.begin([device.spec for device in self.devices], s, count, max_tokens, self.bf16)
        commands = [SeqCreate(count, s.layers, len(m.kv_heads), s.head_dim, max_tokens, code) for m in self.shares]
        done = self._collect(self._submit(commands, self.now_ns))
        return Batch([c.data[0].astype(np.uint64) for c in done], np.zeros((count, s.layers), np.int64))

    def append(self, batch: Batch, rows: Rows, layer: int, lengths: I64, load: Callable[[], tuple[F16, F16]]) -> None:
        """Store new tokens of a layer in the background.

        An error of a drive is raised by the next call that waits.

        Args:
            batch: Sequences.
            rows: Rows of the batch.
            layer: Layer index.
            lengths: New tokens of each row.
            load: Returns k and v, (sum of lengths, kv_heads, d) each; called in the background.
        """
        while len(self._in_flight) >= LAYERS_IN_FLIGHT:
            self._settle_oldest()
        submit_ns, recorder = self.now_ns, self.recorder

        def ship() -> list[Future[Completion]]:
            k, v = load()
            if recorder:
                recorder.add_prompt(layer, rows, lengths, k, v)
            return self._submit(
                [
                    KvAppend(
                        seqs, layer, lengths, _heads(k, share.kv_heads), _heads(self._sent_values(v), share.kv_heads)
                    )
                    for seqs, share in zip(self._handles(batch, rows), self.shares, strict=True)
                ],
                submit_ns,
            )

        self._in_flight.append(self._shipper.submit(ship))
        assert len(self._in_flight) <= LAYERS_IN_FLIGHT and (lengths >= 0).all()
        batch.lengths[rows, layer] += lengths

    def await_append(self) -> None:
        """Wait for the last `append` and raise its error here; in simulated time it is still in flight."""
        try:
            done = [future.result() for future in self._in_flight[-1].result()]
        except Exception:  # error of `load`
            self._in_flight.pop()
            raise
        if any(completion.status is not Status.SUCCESS for completion in done):
            self._in_flight.pop()
            self._checked(done)

    def settle(self) -> None:
        """Wait until all shipped tokens are stored."""
        while self._in_flight:
            self._settle_oldest()

    def decode(self, batch: Batch, rows: Rows, micro_batch: MicroBatch, layer: int, q: F16, k: F16, v: F16) -> F16:
        """Store one new token per sequence and attend.

        Args:
            batch: Sequences.
            rows: Rows of the batch, B of them.
            micro_batch: Part of a decode step.
            layer: Layer index.
            q: Queries, (B, q_heads, d).
            k, v: New key and value, (B, kv_heads, d).

        Returns:
            Attention output, (B, q_heads, d).
        """
        return self.attend(batch, rows, micro_batch, layer, q, k, v)[0]

    def attend(
        self, batch: Batch, rows: Rows, micro_batch: MicroBatch, layer: int, q: F16, k: F16, v: F16
    ) -> tuple[F16, F32]:
        """`decode` with the sums that are needed to merge the output with attention to other tokens elsewhere.

        Returns:
            Output (B, q_heads, d), and m and l of each query head, (B, q_heads, 2); see `csd_spec.Attend` and
            `attention_engine.merge`.
        """
        lengths, shape = batch.lengths[rows, layer] + 1, self.shape
        params = micro_batch.params(self.attention, lengths, shape.head_dim)
        method, commands, terms = self.attention.method, list[Command](), self.terms.get(layer)
        if self.recorder:
            self.recorder.add_step(layer, rows, (q, k, v), terms)
        for seqs, share in zip(self._handles(batch, rows), self.shares, strict=True):
            heads, grouped = share.kv_heads, (len(share.kv_heads), share.group)
            queries = _heads(q, share.q_heads).reshape(len(lengths), *grouped, shape.head_dim)
            told = None if terms is None else _heads(terms.reshape(1, -1, 4), share.q_heads).reshape(*grouped, 4)
            tensors = queries, _heads(k, heads), _heads(self._sent_values(v), heads)
            commands.append(Attend(seqs, layer, *tensors, method, *params, told))
        began_ns, done = micro_batch.now_ns, self._on_all_drives(micro_batch, commands)
        batch.lengths[rows, layer] = lengths
        self._account(micro_batch, done, lengths)
        if self.observer:
            self.observer.end_layer(micro_batch.number, layer, began_ns, done)
        output, sums = (_joined(parts) for parts in zip(*(c.data for c in done), strict=True))
        assert output.shape[1] == q.shape[1], f"drives return {output.shape[1]} of {q.shape[1]} heads"
        return output, sums

    def read(self, batch: Batch, rows: Rows, layer: int, first: int = 0, tokens: int = 0) -> tuple[F16, F16]:
        """Read back keys and values of a layer; the only command that returns KV data to the host.

        Args:
            batch: Sequences.
            rows: Rows of the batch.
            layer: Layer index.
            first: First token of each sequence.
            tokens: Number of tokens of each sequence, fewer if it is shorter; 0: all.

        Returns:
            Keys and values, (sum of tokens, kv_heads, d) each.
        """
        self.settle()
        readers = 1 if self.shape.latent else len(self.devices)  # latent rows are replicated: read from the first drive
        lengths, head_bytes = batch.lengths[rows, layer].tolist(), 2 * FP16_BYTES * self.shape.head_dim
        drives = zip(self.devices[:readers], self.shares, self._handles(batch, rows), strict=False)
        reads = [
            SplitRead(device, KvRead(seqs, layer, first, tokens), head_bytes * len(share.kv_heads), lengths)
            for device, share, seqs in drives
        ]
        k, v = zip(*(c.data for c in self._ended(submit_reads(reads, self.now_ns))), strict=True)
        return np.concatenate(k, axis=1), np.concatenate(v, axis=1)

    def crop(self, batch: Batch, rows: Rows, layer: int, lengths: I64) -> None:
        """Keep the first lengths[b] tokens of a layer of each of these sequences."""
        self.settle()
        self._wait([KvCrop(seqs, layer, lengths) for seqs in self._handles(batch, rows)])
        batch.lengths[rows, layer] = np.minimum(batch.lengths[rows, layer], lengths)

    def free(self, batch: Batch) -> None:
        """Free sequences on the drives that still respond; no effect after `close`."""
        if not self._closed:
            self.settle()
            commands = [KvFree(seqs) for seqs in self._handles(batch, slice(None))]
            done = self._collect(self._submit(commands, self.now_ns), ignore_lost_drives=True)
            self.now_ns = max([self.now_ns, *(c.finish_ns for c in done)])

    def flush(self) -> None:
        """Flush all drives; on return all data so far survives a power loss."""
        self.settle()
        self._wait([Flush() for _ in self.devices])

    def close(self) -> None:
        """Wait for all commands in flight, ignoring their errors; refuse further work."""
        self._closed = True
        self._shipper.shutdown()
        self._abandon()

    @contextmanager
    def step(self, count: int) -> Iterator[list[MicroBatch]]:
        """Run one decode step in `count` micro-batches, which start at the same simulated time."""
        self.settle()
        began_ns = self.now_ns
        self.traffic.begin_step()
        if self.observer:
            self.observer.begin_step(began_ns)
        order = CommandOrder(count) if count > 1 else None
        micro_batches = [MicroBatch(began_ns, order=order, number=number) for number in range(count)]
        yield micro_batches
        last = max(micro_batches, key=lambda micro_batch: micro_batch.now_ns)
        self.traffic.end_step(last.now_ns - began_ns, last.breakdown_ns)
        self.now_ns = max(self.now_ns, last.now_ns)  # copies to and from drives may have been in flight
        if self.observer:
            self.observer.end_step(last.now_ns)
        if self.recorder and self.recorder.end_step():
            self.recorder = None
        if self.flush_interval_steps and self.traffic.step_count % self.flush_interval_steps == 0:
            self.flush()

    def _account(self, micro_batch: MicroBatch, done: list[Completion], lengths: I64) -> None:
        """Account for a layer: it ends with its slowest drive, whose breakdown is the layer's."""
        slowest = done[0] if len(done) == 1 else max(done, key=lambda c: c.finish_ns)
        for unit, ns in slowest.breakdown_ns.items():
            micro_batch.breakdown_ns[unit] += ns
        assert slowest.finish_ns >= micro_batch.now_ns, "a layer ended before it began"
        micro_batch.now_ns = slowest.finish_ns
        counts = lengths.tolist()
        self.traffic.count_decode(done, sum(counts) * self.shape.kv_bytes_per_token // self.shape.layers, max(counts))

    def _sent_values(self, v: F16) -> F16:
        """Values as sent to drives: none for latent attention, where they are part of the keys."""
        return v[..., :0] if self.shape.latent else v

    def _handles(self, batch: Batch, rows: Rows) -> list[tuple[int, ...]]:
        return [tuple(handles[rows].tolist()) for handles in batch.handles]

    def _submit(self, commands: Sequence[Command], submit_ns: int) -> list[Future[Completion]]:
        """Submit one command to each of the first drives."""
        return [device.submit(command, submit_ns) for device, command in zip(self.devices, commands, strict=False)]

    def _on_all_drives(self, micro_batch: MicroBatch, commands: Sequence[Command]) -> list[Completion]:
        """Run one command per drive; returns the completions.

        This thread executes the last drive's command itself if the drive allows it and no other micro-batch waits.
        """
        if self._carry_last is None or micro_batch.order:
            with micro_batch.turn():
                submitted = self._submit(commands, micro_batch.now_ns)
            return self._collect(submitted)
        submitted = self._submit(commands[:-1], micro_batch.now_ns)
        last = self._carry_last(commands[-1], micro_batch.now_ns)
        return self._checked([*(future.result() for future in submitted), last])

    def _collect(self, submitted: list[Future[Completion]], ignore_lost_drives: bool = False) -> list[Completion]:
        """Wait for every drive, then raise the first error. `ignore_lost_drives`: a lost drive is not an error."""
        return self._checked([future.result() for future in submitted], ignore_lost_drives)

    def _checked(self, done: list[Completion], ignore_lost_drives: bool = False) -> list[Completion]:
        self.traffic.count(done)
        for drive, completion in enumerate(done):
            if ignore_lost_drives and completion.status is Status.PATH_LOST:
                continue
            if completion.status is not Status.SUCCESS:
                raise DriveError(
                    drive, completion.status, completion.reason + self._lost_heads_message(drive, completion)
                )
        return done

    def _lost_heads_message(self, drive: int, completion: Completion) -> str:
        if completion.status is not Status.PATH_LOST:
            return ""
        share = self.shares[drive]
        kind, heads = ("query", share.q_heads) if self.shape.latent else ("KV", share.kv_heads)
        return f"; {kind} heads {', '.join(map(str, heads))} of all sequences are lost, the other drives are unharmed"

    def _wait(self, commands: Sequence[Command]) -> list[Completion]:
        """Submit, wait and advance the simulated time."""
        return self._ended(self._submit(commands, self.now_ns))

    def _ended(self, submitted: list[Future[Completion]]) -> list[Completion]:
        """Wait for submitted commands and advance the simulated time."""
        done = self._collect(submitted)
        self.now_ns = max([self.now_ns, *(c.finish_ns for c in done)])
        return done

    def _abandon(self) -> None:
        """Wait for all commands in flight, ignoring errors."""
        while self._in_flight:
            shipped = self._in_flight.popleft()
            for future in () if shipped.exception() else shipped.result():
                future.exception()

    def _settle_oldest(self) -> None:
        try:
            done = self._collect(self._in_flight.popleft().result())
        except Exception:  # error of a drive or of `load`
            self._abandon()
            raise
        finish_ns = max(c.finish_ns for c in done)
        self.traffic.prefill_ns += max(0, finish_ns - self.now_ns)
        self.now_ns = max(self.now_ns, finish_ns)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate the drives' outputs (B, KV heads, G, ...) by query head: (B, q_heads, ...)."""
    by_query = [part.reshape(len(part), -1, part.shape[-1]) for part in parts]
    return by_query[0] if len(by_query) == 1 else np.concatenate(by_query, axis=1)


def _heads(rows: NDArray[Any], heads: range) -> NDArray[Any]:
    """Part of rows (tokens, heads, ...) that belongs to a drive's heads."""
    return np.ascontiguousarray(rows[:, heads.start : heads.stop])
