"""A host that runs random work on drives through the real driver, and knows the expected answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from csd_link.host_end import WindowDrive
from csd_link.recovery import RecoveringDrive
from csd_spec import (
    AttentionConfig,
    Command,
    Completion,
    CompressionBudget,
    DriveError,
    KvDrop,
    KvExist,
    KvName,
    ModelShape,
    SeqFork,
    Status,
)
from csd_spec.arrays import F16, keys_of
from csd_spec.layouts import layout_named
from host_driver.batch import Batch
from host_driver.driver import Driver
from vcsd_eval.verify.random_host import DIM, DRIVE, as_stored

LAYERS, HEADS_A_DRIVE, GROUP = 2, 2, 2
VERBS = (
    *("create", "append", "append", "decode", "decode", "read", "crop", "free", "flush"),
    *("fork", "name", "name", "name", "find", "find", "drop"),
)
KEYS = [bytes([number]) * 16 for number in range(1, 5)]
LAYOUTS_USED = *(5 * ("fp16",)), "int8", "int4", "progressive", "progressive4-exact"
METHODS = "dense", "progressive"  # the second for layouts with bit planes
MAX_TOKENS = 64
TOLERANCE = 4e-3  # of attention in FP16


class Wrong(Exception):
    """A wrong answer."""


class Inline:
    """An executor without threads."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run the function now."""
        future = Future[Any]()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - raised by the caller of result()
            future.set_exception(error)
        return future

    def shutdown(self) -> None: ...


@dataclass(slots=True)
class Held:
    """Sequences of a batch, and their rows: keys and values of each layer, (B, S, H, d)."""

    batch: Batch
    layers: list[tuple[F16, F16]]


class SimHost:
    """One tenant's host. connects: how to reach each drive."""

    def __init__(self, connects: list[Callable[[], WindowDrive]], draw: random.Random) -> None:
        """Raises DriveLostError where a drive does not answer."""
        self.draw, self.generator = draw, np.random.default_rng(draw.randrange(1 << 30))
        self.heads = HEADS_A_DRIVE * len(connects)
        shape = ModelShape(name="sim", layers=LAYERS, q_heads=GROUP * self.heads, kv_heads=self.heads, head_dim=DIM)
        self.devices = [RecoveringDrive(connect) for connect in connects]
        layout = draw.choice(LAYOUTS_USED)
        self.form = layout_named(layout).form(DRIVE.geometry.page_bytes, DIM, MAX_TOKENS)
        attention = AttentionConfig(
            draw.choice(METHODS if self.form.progressive else METHODS[:1]), CompressionBudget(1), layout
        )
        self.driver = Driver(self.devices, shape, attention, flush_interval_steps=draw.choice([0, 2, 5]))
        self.held: list[Held] = []
        self.named: dict[bytes, tuple[Held, int]] = {}  # key -> (batch that holds its first sequence, tokens)
        self.unsure = set(KEYS)  # keys set by a previous host, or by a verb without an answer

    def rows(self, *shape: int) -> F16:
        return self.generator.standard_normal((*shape, DIM)).astype(np.float16)

    def work(self) -> None:
        """Run one verb. Raises Wrong for a wrong answer, DriveError if a drive refuses."""
        verb = self.draw.choice(VERBS) if self.held else "create"
        if len(self.held) >= 4:
            verb = "free"
        self._do(verb, self.draw.choice(self.held) if self.held else None)

    def _do(self, verb: str, held: Held | None) -> None:
        """Run a verb; if a drive refuses it, the batch may have grown in some layers only, and is freed."""
        try:
            getattr(self, f"_{verb}")(held)
        except DriveError:
            if held in self.held:
                self._free(held)
            raise

    def _create(self, _: Held | None) -> None:
        count = self.draw.choice([1, 2])
        empty = self.rows(count, 0, self.heads)
        self.held.append(Held(self.driver.create(count, MAX_TOKENS), [(empty, empty)] * LAYERS))

    def _append(self, held: Held) -> None:
        lengths = np.full(len(held.layers[0][0]), self.draw.choice([3, 17, 40]))
        for layer in range(LAYERS):
            k, v = (self.rows(int(lengths[0]) * lengths.size, self.heads) for _ in range(2))
            self.driver.append(held.batch, slice(None), layer, lengths, partial(_both, k, v))
            self.driver.settle()
            self._grow(held, layer, *(x.reshape(lengths.size, -1, self.heads, DIM) for x in (k, v)))

    def _grow(self, held: Held, layer: int, k: F16, v: F16) -> None:
        old_k, old_v = held.layers[layer]
        grown = (
            as_stored(self.form, old_k.shape[1], np.concatenate(ks), np.concatenate(vs))
            for ks, vs in zip(zip(old_k, k, strict=True), zip(old_v, v, strict=True), strict=True)
        )
        ks, vs = zip(*grown, strict=True)
        held.layers[layer] = np.stack(ks), np.stack(vs)

    def _decode(self, held: Held) -> None:
        count = len(held.layers[0][0])
        for _ in range(self.draw.choice([1, 3])):
            with self.driver.step(1) as (part,):
                for layer in range(LAYERS):
                    q, k, v = (self.rows(count, heads) for heads in (GROUP * self.heads, self.heads, self.heads))
                    output = self.driver.decode(held.batch, slice(None), part, layer, q, k, v)
                    self._grow(held, layer, k[:, None], v[:, None])
                    if not self._is_attention(output, q, *held.layers[layer]):
                        raise Wrong(f"attention of layer {layer} over {held.layers[layer][0].shape[1]} tokens")

    def _is_attention(self, output: F16, q: F16, k: F16, v: F16) -> bool:
        """Whether an output (B, q_heads, d) is that of dense attention; of another method, within the range of V."""
        if self.driver.attention.method == "dense":
            return np.allclose(output.astype(np.float32), _attention(q, k, v), atol=TOLERANCE)
        low, high = (np.repeat(bound.astype(np.float32), GROUP, axis=1) for bound in (v.min(1), v.max(1)))
        return bool((output >= low - TOLERANCE).all() and (output <= high + TOLERANCE).all())

    def _read(self, held: Held) -> None:
        for layer, rows in enumerate(held.layers):
            arrays = self.driver.read(held.batch, slice(None), layer)
            for array, row in zip(arrays, rows, strict=True):
                if not np.array_equal(array.reshape(row.shape), row):
                    raise Wrong(f"layer {layer} reads back different data")

    def _crop(self, held: Held) -> None:
        for layer, (k, v) in enumerate(held.layers):
            length = self.draw.randrange(k.shape[1] + 1)
            self.driver.crop(held.batch, slice(None), layer, np.full(len(k), length))
            held.layers[layer] = k[:, :length], v[:, :length]
            self._forget([key for key, (whose, tokens) in self.named.items() if whose is held and tokens > length])

    def _free(self, held: Held) -> None:
        self.held.remove(held)
        self._forget([key for key, (whose, _) in self.named.items() if whose is held])
        self.driver.free(held.batch)

    def _fork(self, held: Held) -> None:
        length = self.draw.randrange(held.layers[0][0].shape[1] + 1)
        forks = [SeqFork((int(handles[0]),), np.array([length])) for handles in held.batch.handles]
        handles = [done.data[0].astype(np.uint64) for done in self._all(forks)]
        layers = [(k[:1, :length], v[:1, :length]) for k, v in held.layers]
        self.held.append(Held(Batch(handles, np.array([[k.shape[1] for k, _ in layers]])), layers))

    def _name(self, held: Held) -> None:
        key, length = self.draw.choice(KEYS), min(k.shape[1] for k, _ in held.layers)
        if length:
            tokens = self.draw.randint(1, length)
            self.unsure.add(key)
            self._all(
                [KvName((int(handle[0]),), np.array([tokens]), keys_of([key])) for handle in held.batch.handles],
            )
            self.unsure.discard(key)
            self.named[key] = held, tokens

    def _drop(self, held: Held) -> None:
        key = self.draw.choice(KEYS)
        self.unsure.add(key)
        self._all([KvDrop(keys_of([key])) for _ in self.devices])
        self.unsure.discard(key)
        self._forget([key])

    def _find(self, held: Held) -> None:
        for key in KEYS:
            if key not in self.unsure:
                self._look_up(key)

    def _look_up(self, key: bytes) -> None:
        whose, tokens = self.named.get(key, (None, 0))
        for drive, done in enumerate(self._all([KvExist(keys_of([key])) for _ in self.devices])):
            named = int(whose.batch.handles[drive][0]) if whose else 0
            answer = int(done.data[0][0]), int(done.data[1][0])
            if answer != (named, tokens):
                raise Wrong(f"key {key[0]} names {answer[1]} tokens of sequence {answer[0]}, not {tokens} of {named}")

    def _forget(self, keys: list[bytes]) -> None:
        for key in keys:
            self.named.pop(key, None)

    def _all(self, commands: Sequence[Command]) -> list[Completion]:
        """A command to each drive; raises DriveError for the first that refuses."""
        done = [
            device.submit(command, self.driver.now_ns).result()
            for device, command in zip(self.devices, commands, strict=True)
        ]
        for drive, completion in enumerate(done):
            if completion.status is not Status.SUCCESS:
                raise DriveError(drive, completion.status, completion.reason)
        return done

    def _flush(self, held: Held) -> None:
        """Flush right after decode steps; all but the first of these may use the fast path."""
        for _ in range(2):
            self._decode(held)
        self.driver.flush()

    def connected(self) -> int:
        """Number of reconnects to drives."""
        return sum(len(device.recoveries) for device in self.devices)

    def work_and_flush(self) -> None:
        """Decode steps, and a flush that they have to survive."""
        self._do("flush", self.draw.choice(self.held))

    def rewrite(self) -> None:
        """Crop a sequence that was flushed, and append other rows in their place, which no flush has recorded."""
        self._do("rewrite", self.draw.choice(self.held))

    def _rewrite(self, held: Held) -> None:
        self._append(held)
        self.driver.flush()
        self._crop(held)
        self._append(held)

    def check(self) -> None:
        """Read all stored data, and look up all keys."""
        for held in self.held:
            self._read(held)
            self._find(held)

    def leave(self) -> None:
        """Free everything and disconnect."""
        while self.held:
            self._free(self.held[0])
        self.driver.close()


def _both(k: F16, v: F16) -> tuple[F16, F16]:
    return k, v


def _attention(q: F16, k: F16, v: F16) -> Any:
    """Dense attention in float32: q (B, q_heads, d), k and v (B, S, H, d)."""
    keys, values = (np.repeat(x.astype(np.float32), GROUP, axis=2) for x in (k, v))
    logits = np.einsum("bhd,bshd->bhs", q.astype(np.float32), keys) / np.sqrt(DIM)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    return np.einsum("bhs,bshd->bhd", weights / weights.sum(axis=2, keepdims=True), values)
