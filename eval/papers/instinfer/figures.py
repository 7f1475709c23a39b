"""InstInfer's figures for the report: one drive, scaling and sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from vcsd_eval.papers.instinfer import breakdown, engine_breakdown, scaling, sensitivity, throughput
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs
from vcsd_eval.papers.instinfer.systems import SPARF
from vcsd_eval.papers.paper import Chart, Section

BATCHES, BROKEN_DOWN = (4, 16, 32, 64, 128, 256), (4, 64, 256)
UNITS = {
    "batch": "batch size, sequences",
    "tokens_per_s": "throughput, tokens/s",
    "y": "fraction of the sum of parts",
    "kv_share": "KV data",
    "engine_share": "engine",
    "other_share": "GPU, links and runtime",
    "drives": "number of drives",
    "speedup": "throughput, multiple of 1 drive's",
    "compression": "compression, C of 1/C",
}
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
    sensitive = [{"system": SPARF.name, **row} for row in sensitivity.rows(runs, 256, 1, COMPRESSIONS, page_shares)]
    return [
        Section(
            "Throughput, 1 drive",
            Chart("lines", rates, "batch", ("tokens_per_s",), "system", UNITS),
            command="vcsd eval throughput --drives 1",
        ),
        Section("", rows=rates, columns=("system", "batch", "tokens_per_s", "step_s", "reason")),
        Section(
            "Decode step",
            Chart("stack", steps, "batch", breakdown.SHARES, "system", UNITS),
            command="vcsd eval breakdown",
        ),
        Section(
            "A drive's units, batch 64",
            rows=units,
            columns=("system", "unit", "s", "share"),
            command="vcsd eval engine-breakdown --drives 1",
        ),
        Section(
            "Scaling, batch 256",
            Chart("lines", by_count, "drives", ("speedup",), "system", UNITS),
            command="vcsd eval scaling",
        ),
        Section("", rows=by_count, columns=("system", "drives", "tokens_per_s", "speedup")),
        Section(
            "Sensitivity, batch 256",
            Chart("lines", sensitive, "compression", ("tokens_per_s",), "system", UNITS),
            command="vcsd eval sensitivity",
        ),
        Section("Configuration", value=asdict(runs.setup)),
    ]
