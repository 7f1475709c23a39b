"""A drive at full scale without data: every page of a decode step, its flash time and its engine time.

A pattern of selections replaces the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from attention_engine import METHODS, Arithmetic, Compute, DecodeStep, EngineClock, Queries, Read
from attention_engine.page_selection import Worth
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.schedule import SCHEDULES, StepResources
from csd_spec import DriveSpec, KvSlotView, ModelShape, SparFParams
from csd_spec.arrays import I32, I64
from csd_spec.layouts import layout_named
from ftl import Ftl, Nand


class Pattern(Arithmetic):
    """Random selections: any channels and whole pages; tokens in a fraction `page_share` of all pages.

    The same for every layer, since the location of a page already depends on the layer.
    """

    def __init__(self, page_share: float, n: int, seed: int = 0) -> None:
        self.page_share, self.n, self.seed = page_share, n, seed
        self._known: dict[tuple[Any, ...], I32] = {}

    def _some(self, streams: int, chosen: int, of: int) -> I32:
        """`chosen` numbers below `of` for each stream, ascending."""
        key = streams, chosen, of
        if key not in self._known:
            draws = np.random.default_rng((self.seed, *key)).random((streams, of), np.float32)
            self._known[key] = np.sort(np.argpartition(draws, min(chosen, of - 1), axis=1)[:, :chosen]).astype(np.int32)
        return self._known[key]

    def top_channels(self, q: Any, r: int, threads: int = 1) -> I32:
        return self._some(q.shape[0], r, q.shape[2])

    def best_tokens(self, scores: Any, seq_lens: I64, k: I64, recent: I64, threads: int = 1) -> I32:
        count, length = int(k[0]), int(seq_lens[0])
        pages = -(-length // self.n)
        spread = min(count, max(-(-count // self.n), round(self.page_share * pages)))
        chosen = self._some(len(k), spread, pages)
        of_pages = count // spread + (np.arange(spread) < count % spread)  # tokens of each page
        inside = np.concatenate([np.arange(number) for number in of_pages]).astype(np.int32)
        tokens = np.repeat(chosen, of_pages, axis=1) * np.int32(self.n) + inside
        most: I32 = np.minimum(tokens, np.int32(length - 1))
        return most

    def top_pages(
        self, scores: Any, seq_lens: I64, n: int, pages: I64, recent: I64, p: float = 1.0, threads: int = 1
    ) -> tuple[I32, I64]:
        whole = int(seq_lens[0]) // n
        wanted = max(int(pages[0]), whole - (int(seq_lens[0]) - int(recent[0])) // n)
        chosen = self._some(len(pages), min(wanted, whole), whole)
        tokens = (chosen[:, :, None] * np.int32(n) + np.arange(n, dtype=np.int32)).reshape(len(pages), -1)
        rest = np.arange(whole * n, int(seq_lens[0]), dtype=np.int32)
        every: I32 = np.concatenate([tokens, np.broadcast_to(rest, (len(pages), rest.size))], axis=1).astype(np.int32)
        return every, np.full(len(pages), every.shape[1], np.int64)

    def approximate(self, *arguments: Any) -> Any:
        return None

    softmax_scores = selected_mass = exact = approximate  # type: ignore[assignment]

    def score(self, view: KvSlotView, q: Any, threads: int = 1) -> Any:
        return np.zeros((0, 0, 0), np.float32), np.float32(0)

    def weigh_pages(self, logits: Any, seq_lens: I64, form: tuple[int, int, float], *arguments: Any) -> Worth:
        """Select all value groups, and random refined pages up to the budget."""
        (n, per_group, _), streams, longest = form, len(seq_lens), int(seq_lens.max())
        pages, groups = -(-longest // n), -(-longest // per_group)
        errors = 1 + np.random.default_rng((self.seed, streams, pages)).random((streams, pages), np.float32)
        rows = np.zeros((streams, 1, 2), np.float32)
        return Worth(rows, rows[..., 0], errors, np.ones((streams, 1, groups), np.float32))

    def attend(self, *arguments: Any) -> Any:
        return None, np.float32(0)

    attend_coarse = attend  # type: ignore[assignment]

    def attend_refined(self, *arguments: Any) -> Any:
        return *self.attend(), np.float32(0)


class TimedDrive:
    """The flash translation layer and the engine's clock of a drive without payload.

    Args:
        spec: The drive.
        shape: Layers and heads that it has of a model.
        context: Tokens of the longest sequence.
        layout: Name of the layout.

    Attributes:
        pages, nbytes, macs: Pages read, bytes over the channels and multiply-accumulates of all steps so far.
    """

    def __init__(self, spec: DriveSpec, shape: ModelShape, context: int, layout: str) -> None:
        self.shape = shape
        self.ftl = Ftl(spec, Nand(spec.geometry, payload=False))
        self.units = StepResources(self.ftl, EngineClock(spec.engine))
        self.layout = layout_named(layout).form(spec.geometry.page_bytes, shape.head_dim, context)
        self.pages = self.nbytes = self.macs = 0

    def close(self) -> None:
        """Release the memory of the translation layer immediately."""
        self.ftl.close()

    def _count(self, work: Sequence[Read | Compute]) -> None:
        for item in work:
            if isinstance(item, Read):
                self.pages += item.plan.ppns.size
                self.nbytes += int(item.plan.nbytes.sum())
            elif item.job == "kernel":
                self.macs += int((item.lines * item.length).sum()) * item.queries

    def watches(
        self, handles: Sequence[int], method: str, params: SparFParams, page_share: float, schedule: str
    ) -> Iterator[LatencyBreakdown]:
        """The time of each layer of a decode step of some sequences."""
        pattern, zero = Pattern(page_share, self.layout.n), np.zeros(1, np.float32)
        streams = len(handles) * self.shape.kv_heads
        q = np.broadcast_to(zero, (streams, self.shape.group, self.shape.head_dim))
        v_mean = np.broadcast_to(zero, (streams, self.shape.head_dim))
        for layer in range(self.shape.layers):
            queries = Queries.uniform(q, params, v_mean, [{} for _ in handles])
            step = DecodeStep(self.ftl.view(handles, layer), self.ftl, queries, arithmetic=pattern)
            METHODS[method](step)
            self._count(step.work)
            watch = LatencyBreakdown(self.ftl.timing.idle_ns())
            SCHEDULES[schedule](step.work, self.units, watch)
            yield watch


class SimulatedDrive(TimedDrive):
    """Sequences of one length on one drive."""

    def __init__(self, spec: DriveSpec, shape: ModelShape, batch: int, context: int, layout: str) -> None:
        super().__init__(spec, shape, context, layout)
        self.batch, self.length = batch, 0
        self.handles = self.ftl.create(batch, shape.layers, shape.kv_heads, self.layout)

    def grow(self, length: int) -> float:
        """Append tokens up to `length` to every layer; returns the total time of the programs in sequence, seconds."""
        start_ns = self.ftl.timing.idle_ns()
        lengths = np.full(self.batch, length - self.length)
        ends = [
            self.ftl.append(self.handles, layer, lengths, None, None, start_ns)[1] for layer in range(self.shape.layers)
        ]
        self.length = length
        return (max(ends) - start_ns) / 1e9

    def step(self, method: str, params: SparFParams, page_share: float, schedule: str) -> dict[str, float]:
        """Seconds of one decode step by unit."""
        units: Counter[str] = Counter()
        for watch in self.watches(self.handles, method, params, page_share, schedule):
            units.update(watch.breakdown_ns)
        return {unit: ns / 1e9 for unit, ns in units.items() if ns}
