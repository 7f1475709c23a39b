"""InstInfer's figures for the report: one drive, scaling and sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from eval.papers.instinfer import breakdown, engine_breakdown, scaling, sensitivity, throughput
from eval.papers.instinfer.runs import InStorageCase, Runs
from eval.papers.paper import Section
from eval.plot import lines, stack

BATCHES, BROKEN_DOWN = (4, 16, 32, 64, 128, 256), (4, 64, 256)
COUNTS, COMPRESSIONS = (1, 2, 4, 8, 20), (1, 2, 4, 8, 16, 32)


def cases(page_shares: Mapping[float, float]) -> list[InStorageCase]:
    """What `sections` needs. page_shares: of token pages, by compression."""
    return [
        *throughput.cases(BATCHES, 1),
        *breakdown.cases(BROKEN_DOWN, 1),
        *engine_breakdown.cases(64, 1),
        *scaling.cases(256, COUNTS),
        *sensitivity.cases(256, 1, COMPRESSIONS, page_shares),
    ]


def sections(runs: Runs, page_shares: Mapping[float, float]) -> list[Section]:
    """All figures."""
    rates = throughput.rows(runs, BATCHES, 1)
    steps = breakdown.rows(runs, BROKEN_DOWN, 1)
    units = [row for row in engine_breakdown.rows(runs, 64, 1) if row["s"]]
    by_count = scaling.rows(runs, 256, COUNTS)
    sensitive = sensitivity.rows(runs, 256, 1, COMPRESSIONS, page_shares)
    return [
        Section("Throughput, 1 drive", lines(rates, "batch", "tokens_per_s", "system")),
        Section("", rows=rates, columns=("system", "batch", "tokens_per_s", "step_s", "reason")),
        Section("Decode step", stack(steps, "system", breakdown.SHARES)),
        Section("A drive's units, batch 64", rows=units, columns=("system", "unit", "s", "share")),
        Section("Scaling, batch 256", lines(by_count, "drives", "speedup", "system")),
        Section("", rows=by_count, columns=("system", "drives", "tokens_per_s", "speedup")),
        Section("Sensitivity, batch 256", lines(sensitive, "compression", "tokens_per_s", "drives")),
        Section("Configuration", value=asdict(runs.setup)),
    ]
