"""Relative error of a contender's attention output on recorded layers, and the bytes that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_engine import METHODS, AttentionMethod, DecodeStep, EngineClock, Memory, Methods, Queries, Read
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.schedule import SCHEDULES, StepResources
from csd_spec import CompressionBudget
from csd_spec.arrays import F16, F32, F64
from csd_spec.layouts import layout_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl
from vcsd.progress import Tick, no_tick
from vcsd_eval.accuracy.compared_methods import Contender, Trial
from vcsd_eval.accuracy.layers import Layer
from vcsd_eval.accuracy.published import PUBLISHED
from vcsd_eval.accuracy.published.streams import Streams

TOLERANCE = 1.02  # of a budget: channels and tokens are whole
VOTERS = 32  # of a prompt's last queries, which published methods may look at
Row = dict[str, Any]


@dataclass(slots=True)
class Tally:
    """Figures (N, G) of each decode step of one layer, and sums of bytes and of modelled time."""

    number: int
    q_heads: int
    errors: list[F64] = field(default_factory=list)
    masses: list[F64] = field(default_factory=list)
    recalls: list[F64] = field(default_factory=list)
    lost: list[F32] = field(default_factory=list)
    estimates: list[F32] = field(default_factory=list)
    fetched: float = 0
    useful: float = 0
    dense: int = 0
    ns: dict[str, int] = field(default_factory=dict)

    def add(self, layer: Layer, position: int, out: F32, attended: NDArray[np.bool_]) -> None:
        """Count one step.

        Args:
            layer: The layer.
            position: The step's own position.
            out: The contender's output, (N, G, d).
            attended: Which tokens it attended, (N, G or 1, S).
        """
        exact = layer.exact(position)
        norms = np.linalg.norm(exact.out, axis=-1)
        self.errors.append(np.linalg.norm(out - exact.out, axis=-1) / np.where(norms > 0, norms, 1))
        self.masses.append((exact.weights * attended).sum(-1, dtype=np.float64))
        counts = np.broadcast_to(attended.sum(-1), exact.out.shape[:2])
        best = exact.rank < counts[..., None]
        self.recalls.append((best & attended).sum(-1) / np.maximum(counts, 1))
        self.dense += 4 * layer.recorded.k.shape[3] * exact.weights.shape[0] * exact.weights.shape[2]


def measured(
    trial: Trial, layers: Sequence[Layer], methods: Methods = METHODS, tick: Tick = no_tick
) -> tuple[Row, list[Row]]:
    """A trial on layers of the same passages: a row of all of them, and a row of each.

    Columns:
        output_rel_error: |out - exact| / |exact| of a query head, the mean over steps, passages, heads and layers;
            `_p99` and `_worst` of the same.
        mass_recall: Softmax weight of the attended tokens, the mean; `mass_lost_worst`: the largest weight that a head
            misses.
        lost_mass: Softmax weight replaced by the mean of V, as estimated by the method, the mean; `_worst`: the
            largest. None of methods on arrays.
        error_estimate: Expected error of an output due to codes, as estimated by the method, the same.
        passages: Mean error of each passage.
        token_recall: Share of the n tokens of largest weight that are among the n attended ones.
        bytes_fetched_share, bytes_useful_share: Bytes that cross the channels and bytes that pass the filters, as
            shares of the KV data in FP16. For methods on arrays both are counted by element.
        heads: Mean error of each query head, of a layer's row alone.
        serial_us, overlapped_us: Modelled time of a layer's step on one drive that holds all passages.
    """
    contender = trial.contender
    tallies = []
    for layer in layers:
        tallies.append(_on_arrays(trial, layer) if contender.arrays else _on_a_drive(trial, methods, layer))
        tick(None)
    by_layer = []
    for tally in tallies:
        heads = [float(error) for error in _by_head(tally).mean(0)]
        by_layer.append(_row(trial, [tally]) | {"layer": tally.number, "heads": heads})
    return _row(trial, tallies), by_layer


def label(row: Row) -> str:
    """A row's name in tables and pictures: the contender's, and the convention of its budget unless that is bytes."""
    return str(row["name"]) if row["convention"] == "bytes" else f"{row['name']} ({row['convention']})"


def _row(trial: Trial, tallies: list[Tally]) -> Row:
    contender, dense = trial.contender, sum(tally.dense for tally in tallies)
    errors, masses, recalls = (
        np.concatenate([np.ravel(part) for tally in tallies for part in getattr(tally, name)])
        for name in ("errors", "masses", "recalls")
    )
    useful, steps = sum(tally.useful for tally in tallies) / dense, sum(len(tally.errors) for tally in tallies)
    budget = useful if contender.dense else 1 / trial.c
    allowed = budget * (1.5 if trial.convention == "paper" else 1)
    times = {f"{name}_us": sum(t.ns[name] for t in tallies) / steps / 1e3 for name in SCHEDULES if not contender.arrays}
    return {
        "name": contender.name,
        "budget": budget,
        "convention": trial.convention,
        "within_budget": bool(useful <= TOLERANCE * allowed),
        "counted_by": "element" if contender.arrays or contender.ideal else "page",
        "bytes_fetched_share": sum(tally.fetched for tally in tallies) / dense,
        "bytes_useful_share": useful,
        "output_rel_error": float(errors.mean()),
        "output_rel_error_p99": float(np.percentile(errors, 99)),
        "output_rel_error_worst": float(errors.max()),
        "mass_recall": float(masses.mean()),
        "mass_lost_worst": float(1 - masses.min()),
        "token_recall": float(recalls.mean()),
        **_said(tallies),
        "passages": [float(error) for error in np.mean([_by_head(tally) for tally in tallies], (0, 2))],
        **times,
    }


def _said(tallies: list[Tally]) -> dict[str, float | None]:
    """Estimates that a method on a drive makes of its own output."""
    said: dict[str, float | None] = {}
    for key, name in (("lost_mass", "lost"), ("error_estimate", "estimates")):
        rows = [np.ravel(part) for tally in tallies for part in getattr(tally, name)]
        values = np.concatenate(rows) if rows else None
        said |= {key: None if values is None else float(values.mean())}
        said |= {f"{key}_worst": None if values is None else float(values.max())}
    return said


def _by_head(tally: Tally) -> F64:
    """Mean error over steps of each passage and query head, (B, q_heads)."""
    errors: F64 = np.stack(tally.errors).reshape(len(tally.errors), -1, tally.q_heads).mean(0)
    return errors


def _on_a_drive(trial: Trial, methods: Methods, layer: Layer) -> Tally:
    """Decode one layer of all passages in a drive, after its prompt."""
    contender, tokens = trial.contender, layer.tokens
    B, Hq, length, d = layer.recorded.q.shape
    H = layer.recorded.k.shape[1]
    tally = Tally(layer.number, Hq, ns=dict.fromkeys(SCHEDULES, 0))
    copy_bytes = B * H * length * d * layout_named(contender.layout).bits // 8
    spec = replace(INSTCSD_ZYNQ7045_8CH, cache_bytes=int(contender.cache_share * copy_bytes))
    with closing(Ftl(spec)) as ftl:
        units = StepResources(ftl, EngineClock(ftl.spec.engine))
        layout = layout_named(contender.layout).form(ftl.spec.geometry.page_bytes, d, length)
        handles = ftl.create(B, 1, H, layout)
        memory = _memory(contender, layer)
        layer = layer.placed(layout.n) if contender.similar else layer
        recorded = layer.recorded
        k, v = (part.transpose(0, 2, 1, 3) for part in (recorded.k, recorded.v))
        _append(ftl, handles, k[:, :tokens], v[:, :tokens])
        for position in range(tokens, length):
            _append(ftl, handles, k[:, position : position + 1], v[:, position : position + 1])
            params = CompressionBudget(trial.c, trial.convention).at(position + 1, d)
            v_mean = recorded.v[:, :, : position + 1].astype(np.float32).mean(2).reshape(B * H, d)
            queries = Queries.uniform(layer.queries(position), params, v_mean, memory)
            step = DecodeStep(ftl.view(handles, 0), ftl, queries)
            _count(tally, step, methods[contender.method], layer, position)
            for name, schedule in SCHEDULES.items():
                watch = LatencyBreakdown(ftl.timing.idle_ns())
                schedule(step.work, units, watch)
                tally.ns[name] += sum(watch.breakdown_ns.values())
    return tally


def _memory(contender: Contender, layer: Layer) -> list[Memory]:
    """A method's memory of each passage before the first step: for H2O the weights that each token got so far."""
    B = layer.recorded.q.shape[0]
    return [{"h2o": weights} for weights in layer.gathered()] if contender.method == "h2o" else [{} for _ in range(B)]


def _append(ftl: Ftl, handles: list[int], k: F16, v: F16) -> None:
    """Append rows (B, t, H, d) to every sequence."""
    lengths = np.full(len(handles), k.shape[1])
    flat_k, flat_v = (np.ascontiguousarray(part).reshape(-1, *part.shape[2:]) for part in (k, v))
    ftl.append(handles, 0, lengths, flat_k, flat_v, ftl.timing.idle_ns())


def _count(tally: Tally, step: DecodeStep, method: AttentionMethod, layer: Layer, position: int) -> None:
    out = method(step)
    assert step.chosen is not None
    tokens, counts = step.chosen
    attended = np.zeros((len(counts), position + 2), np.bool_)  # the last column takes what is not used
    used = np.arange(tokens.shape[1]) < counts[:, None]
    np.put_along_axis(attended, np.where(used, tokens, position + 1), True, 1)
    streams = step.streams  # a query head may have chosen for itself
    tally.add(layer, position, out, attended[:, :-1].reshape(streams, -1, position + 1))
    tally.lost.append(step.lost)
    tally.estimates.append(step.errors)
    for item in step.work:
        if isinstance(item, Read):
            tally.fetched += int(item.plan.nbytes.sum())
            tally.useful += int(item.plan.useful.sum())


def _on_arrays(trial: Trial, layer: Layer) -> Tally:
    """Decode one layer of all passages by a published method."""
    recorded, tokens = layer.recorded, layer.tokens
    B, Hq, length, d = recorded.q.shape
    H, tally, memory = recorded.k.shape[1], Tally(layer.number, Hq), dict[str, Any]()
    voters = recorded.q[:, :, max(0, tokens - VOTERS) : tokens].astype(np.float32).reshape(B * H, Hq // H, -1, d)
    k, v = (part.astype(np.float32).reshape(B * H, length, d) for part in (recorded.k, recorded.v))
    method = PUBLISHED[trial.contender.method].method
    for position in range(tokens, length):
        rows = slice(0, position + 1)
        seen = Streams(layer.queries(position), k[:, rows], v[:, rows], tokens, voters, memory)
        answer = method(seen, 1 / trial.c)
        attended = answer.attended if answer.attended.ndim == 3 else answer.attended[:, None]
        tally.add(layer, position, answer.out, attended)
        tally.fetched += answer.nbytes
        tally.useful += answer.nbytes
    return tally
