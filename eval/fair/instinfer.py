"""Ours over InstI-SparF: throughput of the paper's batch of 256 on one drive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vcsd_eval.fair.headline import Headline, HeadlineFigure, Ranged, Varied, varied_drive
from vcsd_eval.fair.plain_ssd import RANDOM_READS_PER_S, plain_rate, plain_ssds
from vcsd_eval.fair.points import CSD, GB, PLAIN, SYSTEMS, Point
from vcsd_eval.fair.recorded import SPARF_BUDGET, RecordedRows, default_c
from vcsd_eval.papers.instinfer.fill import Fill
from vcsd_eval.papers.instinfer.runs import run
from vcsd_eval.papers.instinfer.systems import OURS, SPARF, InStorageSystem, Result, Setup
from vcsd_eval.papers.profiles import Model

BATCH, DRIVES = 256, 1
COMMAND = "vcsd eval fair --only instinfer"
BOTH = "same_error_and_schedule"
BATCHED_SPARF = replace(SPARF, name="SparF, our schedule", schedule="overlapped", batched=True)
BATCHES, SSDS_GB_S = (4, 16, 64, 256), (3.9, 7.0, 14.0, 28.0)  # where ours may lose
LARGE_DRAM = 64 << 30  # bytes; holds all rows that wait for their group
TRIED = (16, 64, 256)  # batches between which SparF's step is a line


@dataclass(frozen=True, slots=True)
class InstInferCase:
    """A setup, SparF's share of token pages, our budget at SparF's error, and the read rate of a plain SSD."""

    setup: Setup
    page_share: float
    equal_c: float
    reads_per_s: float = RANDOM_READS_PER_S

    def run(self, system: InStorageSystem, batch: int = BATCH) -> Result:
        """A system in drives."""
        return run(Fill(self.setup, replace(system, page_share=self.page_share), batch, DRIVES))

    @property
    def equal(self) -> InStorageSystem:
        """Ours at SparF's error."""
        return replace(OURS, compression=self.equal_c)


def ratios(case: InstInferCase) -> Mapping[str, float]:
    """Ours over SparF by condition."""
    ours, equal, sparf, batched = (case.run(system).tokens_per_s for system in (OURS, case.equal, SPARF, BATCHED_SPARF))
    plain = plain_ssds(case.setup, case.equal, BATCH, DRIVES, plain_rate(case.setup, DRIVES, case.reads_per_s))
    return {
        "as_published": ours / sparf,
        "same_schedule": ours / batched,
        "same_error": equal / sparf,
        BOTH: equal / batched,
        "same_hardware_plain_ssd": equal / plain.tokens_per_s,
        "same_service": _same_service(case),
    }


def _same_service(case: InstInferCase) -> float:
    """Sequences that are decoded at the same time between tokens and error: ours over SparF in our schedule."""
    steps_s = [case.run(BATCHED_SPARF, batch).step.total_s for batch in TRIED]
    return float(BATCH / np.interp(case.run(case.equal).step.total_s, steps_s, TRIED))


def varied(case: InstInferCase) -> list[Varied[InstInferCase]]:
    """Constants that are assumed or calibrated, and those of the hardware."""
    setup, runtime_s = case.setup, case.setup.constants.sequence_layer_s

    def with_runtime(factor: float) -> InstInferCase:
        constants = replace(setup.constants, sequence_layer_s=factor * runtime_s)
        return replace(case, setup=replace(setup, constants=constants))

    def with_share(factor: float) -> InstInferCase:
        return replace(case, page_share=min(1.0, factor * case.page_share))

    def with_reads(factor: float) -> InstInferCase:
        return replace(case, reads_per_s=factor * case.reads_per_s)

    return [
        Varied("page_share", case.page_share, "of token pages", with_share),
        Varied("sequence_layer_s", runtime_s, "s", with_runtime),
        *varied_drive(setup.drive, lambda drive: replace(case, setup=replace(setup, drive=drive))),
        Varied("reads_per_s", case.reads_per_s, "reads of 4 KiB/s by a plain SSD", with_reads),
    ]


def losses(case: InstInferCase) -> Iterator[dict[str, Any]]:
    """Settings in which a system without computational drives serves more tokens/s in decode than ours at equal error.

    These are plain SSDs, host memory with selection on the GPU, and a GPU that holds the KV data of sequences that fit.
    """
    for model in ("opt-13b", "llama-3-8b"):
        setup = replace(case.setup, model=Model.load(model))
        for batch in BATCHES:
            point = Point(setup, case.equal, batch, DRIVES)
            ours = SYSTEMS[CSD](point)
            others = {name: SYSTEMS[name](point) for name in ("host", "gpu")}
            for rate in SSDS_GB_S:
                others[f"a plain SSD of {rate:g} GB/s"] = SYSTEMS[PLAIN](replace(point, plain_rate=rate * GB))
            for name, theirs in others.items():
                if ours and theirs and theirs > ours:
                    where = {"setting": "model, batch", "value": f"{model}, {batch}", "other": name}
                    yield where | {"ratio": ours / theirs}


def headline(setup: Setup, rows: RecordedRows) -> Headline:
    """The headline of InstInfer: both sides from a model's recorded rows, and with the paper's share of pages."""
    recorded = InstInferCase(setup, rows.page_share, rows.equal_c)
    printed = replace(recorded, page_share=setup.constants.token_page_share)
    base = Ranged.of(recorded, varied(recorded), ratios)
    paper = Ranged.of(printed, varied(printed), ratios)
    roomy = replace(recorded, setup=replace(setup, drive=replace(setup.drive, dram_bytes=LARGE_DRAM)))
    return Headline(
        what=f"tokens/s of ours over InstI-SparF at 1/{SPARF_BUDGET:g}, OPT-13B, batch {BATCH}, {DRIVES} drive",
        figures=_figures(base) | {"as_published": paper.figure("as_published", COMMAND)},
        others={"paper_page_share": _figures(paper)},
        tornado=[*base.tornado(BOTH), *base.tornado("same_hardware_plain_ssd")],
        loses_at=[*losses(recorded)],
        notes=[
            f"recorded on {rows.model}: SparF touches {rows.page_share:.3f} of the token pages (paper: "
            f"{printed.page_share}) and errs by {rows.sparf_error:.4f}; ours errs by "
            f"{rows.ours_error[default_c()]:.4f} at 1/{default_c():g}, as much as SparF at 1/{rows.equal_c:.2f}",
            f"bytes over the flash channels, of those of FP16: SparF {rows.sparf_bytes:.3f}, ours at "
            f"1/{default_c():g} {rows.ours_bytes:.3f}",
            f"rows of SparF's embedding pages wait in DRAM until a page is full; of rows without room it reads token "
            f"pages. With {LARGE_DRAM >> 30} GiB instead of {setup.drive.dram_bytes >> 30} {BOTH} is "
            f"{ratios(roomy)[BOTH]:.2f}",
            "same_hardware_plain_ssd: over our method on a GPU that reads the same flash over the same link",
        ],
    )


def _figures(ranged: Ranged[InstInferCase]) -> dict[str, HeadlineFigure]:
    return {name: ranged.figure(name, COMMAND) for name in ranged.base}
