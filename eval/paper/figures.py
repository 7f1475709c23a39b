"""The evaluation's figures as rows: throughput, breakdowns, scaling, sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attention_engine import oracle
from csd_spec import Compression
from eval.accuracy.record import Recorded, record
from eval.accuracy.selectors import TEXT
from eval.paper.systems import DENSE, OURS, OURS_DENSE, SPARF, Result, Setup, deepspeed, flexgen, in_storage
from eval.plot import new_figure, save_figure
from vcsd.generate import CHECKPOINT, load

Tick = Callable[[object], None] | None
Rows = list[dict[str, Any]]


def throughput(setup: Setup, batches: Sequence[int], drives: int, tick: Tick = None) -> Rows:
    """Figures 4, 12 and 13: tokens a second of the paper's five systems and of ours."""
    rows: Rows = []
    for batch in batches:
        host = [deepspeed(setup, batch, drives), flexgen(setup, batch, drives), flexgen(setup, batch, drives, True)]
        for result in [*host, *in_storage(setup, (DENSE, SPARF, OURS), batch, drives, tick)]:
            rows.append(
                {
                    "system": result.system,
                    "batch": batch,
                    "drives": drives,
                    "tokens_per_s": None if result.reason else result.tokens_per_s,
                    "prefill_s": result.prefill_s,
                    "step_s": result.step.total_s,
                    "realtime_factor": result.realtime_factor,
                    "reason": result.reason,
                }
            )
    return rows


def breakdown(setup: Setup, batches: Sequence[int], drives: int, tick: Tick = None) -> Rows:
    """Figures 5, 14 and 15: what a decode step's time goes to."""
    rows: Rows = []
    for batch in batches:
        host = [flexgen(setup, batch, drives), flexgen(setup, batch, drives, True)]
        for result in [*host, *in_storage(setup, (DENSE, SPARF, OURS), batch, drives, tick)]:
            step = result.step
            shares = {
                f"{name}_share": seconds / step.total_s if step.total_s else None
                for name, seconds in (("kv", step.kv_s), ("engine", step.engine_s), ("other", step.other_s))
            }
            parts = {"step_s": step.total_s, "kv_s": step.kv_s, "engine_s": step.engine_s, "other_s": step.other_s}
            row = {"system": result.system, "batch": batch, "drives": drives, **parts, "hidden_s": step.hidden_s}
            rows.append(row | shares | {"reason": result.reason})
    return rows


def engine_breakdown(setup: Setup, batch: int, drives: int, tick: Tick = None) -> Rows:
    """Figure 16: seconds of each unit of a drive in the middle step."""
    rows: Rows = []
    for result in in_storage(setup, (DENSE, SPARF, OURS), batch, drives, tick):
        total = sum((result.units_s or {}).values())
        for unit, seconds in (result.units_s or {}).items():
            rows.append({"system": result.system, "unit": unit, "s": seconds, "share": seconds / total})
    return rows


def scaling(setup: Setup, batch: int, counts: Sequence[int], tick: Tick = None) -> Rows:
    """Figure 17a: throughput over that of the first number of drives."""
    rows: Rows = []
    first: dict[str, Result] = {}
    for drives in counts:
        for result in in_storage(setup, (DENSE, SPARF, OURS_DENSE, OURS), batch, drives, tick):
            base = first.setdefault(result.system, result)
            rows.append(
                {
                    "system": result.system,
                    "drives": drives,
                    "tokens_per_s": result.tokens_per_s,
                    "speedup": result.tokens_per_s / base.tokens_per_s if base.tokens_per_s else None,
                    "step_s": result.step.total_s,
                    "kv_s": result.step.kv_s,
                    "other_s": result.step.other_s,
                    "reason": result.reason,
                }
            )
    return rows


def sensitivity(
    setup: Setup,
    batch: int,
    drives: int,
    compressions: Sequence[float],
    page_shares: dict[float, float],
    tick: Tick = None,
) -> Rows:
    """Figure 17b: SparF over its compression. page_shares: of token pages, by compression."""
    systems = [
        DENSE if c == 1 else replace(SPARF, name=f"1/{c:g}", compression=c, page_share=page_shares[c])
        for c in compressions
    ]
    results = in_storage(setup, tuple(systems), batch, drives, tick)
    return [
        {
            "compression": c,
            "drives": drives,
            "token_page_share": page_shares.get(c, 1.0),
            "tokens_per_s": result.tokens_per_s,
            "step_s": result.step.total_s,
            "reason": result.reason,
        }
        for c, result in zip(compressions, results, strict=True)
    ]


def page_shares(layers: list[Recorded], compressions: Sequence[float], n: int) -> dict[float, float]:
    """Share of pages of n tokens that SparF touches at the last token of recorded sequences, by compression."""
    shares = {}
    for c in compressions:
        touched = []
        for layer in layers:
            (B, _, S, d), H = layer.q.shape, layer.k.shape[1]
            params = Compression(c).at(S, d)
            for b, h in np.ndindex(B, H):
                q = layer.q[b].reshape(H, -1, S, d)[h, :, -1].astype(np.float64)
                K, V = (part[b, h].astype(np.float64) for part in (layer.k, layer.v))
                _, _, tokens = oracle.sparf(q, K, V, params.r, params.k, params.l)
                touched.append(np.unique(tokens // n).size / -(-S // n))
        shares[c] = float(np.mean(touched))
    return shares


def recorded_shares(setup: Setup, compressions: Sequence[float]) -> dict[float, float]:
    """The same of the shipped model on the shipped text, in pages as large as the setup's."""
    loaded, tokenizer = load(CHECKPOINT)
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"])
    rows = torch.stack([ids[start : start + 1536] for start in (0, 3000, 6000)])
    n = setup.drive.geometry.page_bytes // (2 * setup.model.head_dim)
    return page_shares(record(loaded, rows), compressions, n)


def scaled_shares(setup: Setup, compressions: Sequence[float]) -> dict[float, float]:
    """Recorded shares, scaled so that the one at 1/8 is the paper's."""
    shares = recorded_shares(setup, [*compressions, 8.0])
    scale = setup.constants.token_page_share / shares[8.0]
    return {c: min(1.0, share * scale) for c, share in shares.items()}


def plot_rows(rows: Rows, x: str, y: str, series: str, path: Path) -> None:
    """Draw `lines` into a file."""
    save_figure(lines(rows, x, y, series), path)


def lines(rows: Rows, x: str, y: str, series: str) -> Any:
    """A figure of y over x, a line for each value of `series`."""
    figure, axes = new_figure()
    for name in dict.fromkeys(row[series] for row in rows):
        points = [(row[x], row[y]) for row in rows if row[series] == name and row[y] is not None]
        axes.plot(*zip(*points, strict=True), "o-", label=str(name), markersize=4) if points else None
    axes.set(xlabel=x, ylabel=y, ylim=(0, None))
    if all(isinstance(row[x], int | float) for row in rows):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row[x] for row in rows}), [f"{value:g}" for value in sorted({row[x] for row in rows})])
    axes.legend(fontsize=7)
    return figure


def plot_stack(rows: Rows, label: str, parts: Sequence[str], path: Path) -> None:
    """Draw `stack` into a file."""
    save_figure(stack(rows, label, parts), path)


def stack(rows: Rows, label: str, parts: Sequence[str]) -> Any:
    """A figure with a bar for each row, of shares that add up."""
    figure, axes = new_figure()
    names = [f"{row[label]}\n{row['batch']}" for row in rows if row[parts[0]] is not None]
    bottom = np.zeros(len(names))
    for part in parts:
        values = np.array([row[part] for row in rows if row[part] is not None])
        axes.bar(range(len(names)), values, bottom=bottom, label=part)
        bottom += values
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    axes.legend(fontsize=7)
    return figure
