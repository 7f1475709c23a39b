"""Our value for each of Tutti's claims: prefill by events, one server in closed form, and prices.

The paper's values come from two texts, and the page of each claim ends in its own: a review of the paper, and notes on
it. Values that only the review has wrong are rows of their own (r1 and on).
"""

from __future__ import annotations

import statistics
from typing import Any

from csd_spec.presets import INSTCSD_OVERLAPPED
from vcsd_eval.papers.claims import ClaimKind, claims_of, printed
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import Evaluation, Paper
from vcsd_eval.papers.profiles import Gpu, Model, Ssd
from vcsd_eval.papers.tutti.constants import (
    ASSUMED,
    CALIBRATED,
    DRAM_PATH,
    FEW_TOKENS,
    GDS_PATH,
    HALVINGS,
    LEVAL,
    LOOGLE,
    QUESTION,
    RATE_STEP,
    SIGMA,
    SSD_LONG,
    SSD_PATH,
    SSD_TB,
)
from vcsd_eval.papers.tutti.event_simulation import ByEvents
from vcsd_eval.papers.tutti.in_drives import Drives, table_rows
from vcsd_eval.papers.tutti.reading import DocumentWorkload, GpuReading, Path, mean_ttft_s

Values = dict[str, float]
CLAIMS, PRINTED = claims_of("tutti"), printed("tutti")
REVIEW = "; review"  # at the end of a page
GB, KI = 1e9, 1024
PAGE, LIST, ENTRY = 64 * KI, 4 * KI, 16  # bytes: of a page of the pool, its PRP list, an SGL entry
STORED = 64  # tokens of a block of vLLM
OBJECT = 32 * KI  # bytes, of 16 tokens
H100_HOUR, DRAM_GB_HOUR, SSD_GB_HOUR, DRAM_GB = 5, 0.0088, 0.000082, 256  # $ per hour, $ per GB and hour, pinned GB
DRIVES, QUESTIONS = 8, (1, 16, 64, 256)
TUTTI = Path(PRINTED["t8a"] * GB, layered=True)
DRAM = Path(DRAM_PATH.value * GB, layered=True)
GDS, SSD = Path(GDS_PATH.value * GB), Path(SSD_PATH.value * GB)
SYSTEMS = {"HBM": None, "DRAM": DRAM, "SSD": SSD, "GDS": GDS, "Tutti": TUTTI}
HITS = {
    "LEval": dict(zip(SYSTEMS, (PRINTED[f"t5{each}"] / 100 for each in "abccc"), strict=True)),
    "LooGLE": dict(zip(SYSTEMS, (PRINTED[f"t5{each}"] / 100 for each in "defff"), strict=True)),
}


def workload(name: str) -> DocumentWorkload:
    """Documents of a benchmark, with a question each."""
    mean = {"LEval": LEVAL, "LooGLE": LOOGLE}[name]
    return DocumentWorkload(mean.value, SIGMA.value, int(QUESTION.value))


def _below(ours: float, other: float) -> float:
    return 100 * (1 - ours / other)


def _requests(reading: GpuReading) -> Values:
    """t1 to t3, t23: requests that queue. t20: cost per hour."""
    moments = {
        name: {system: workload(name).moments(reading, HITS[name][system], path) for system, path in SYSTEMS.items()}
        for name in HITS
    }
    leval = {system: mean_ttft_s(moment, 1.5) for system, moment in moments["LEval"].items()}
    loogle = {system: mean_ttft_s(moment, 0.6) for system, moment in moments["LooGLE"].items()}
    tested = [RATE_STEP.value * step for step in range(1, round(1.5 / RATE_STEP.value) + 1)]
    within = {
        system: max(rate for rate in tested if mean_ttft_s(moments["LEval"][system], rate) < 1)
        for system in ("DRAM", "GDS", "Tutti")
    }
    without_dram = H100_HOUR + SSD_TB.value * 1000 * SSD_GB_HOUR
    with_dram = without_dram + DRAM_GB * DRAM_GB_HOUR
    served = min(1, 1 / moments["LooGLE"]["SSD"][0] / 0.5)
    return {
        "t1a": _below(leval["Tutti"], leval["GDS"]),
        "t1b": _below(leval["Tutti"], leval["DRAM"]),
        "t2a": within["Tutti"] / within["DRAM"],
        "t2b": within["Tutti"] / within["GDS"],
        "t3a": _below(loogle["Tutti"], loogle["DRAM"]),
        "t3b": _below(loogle["Tutti"], loogle["GDS"]),
        "t20a": _below(without_dram, with_dram),
        "t20b": _below(without_dram, with_dram / served),
        **{f"t23{letter}": leval[system] for letter, system in (("b", "DRAM"), ("d", "GDS"), ("e", "Tutti"))},
    }


def _one_request(reading: GpuReading) -> Values:
    """t6, t7, t12 to t14: a request alone, with many tokens after its prefix."""
    new, prefix = 16 * KI, 48 * KI
    full, long, question = 128 * KI, 112 * KI, QUESTION.value

    def bubble(path: Path) -> float:
        return 100 * reading.bubble_s(new, prefix, path) / reading.first_token_s(new, prefix, path)

    def first(stored: float, path: Path | None) -> float:
        """TTFT of 128K tokens with `stored` of them stored, or of a question after them, seconds."""
        return reading.first_token_s(full - stored or question, stored, path)

    return {
        "t6b": bubble(Path(DRAM.bytes_per_s)),
        "t6c": bubble(SSD),
        "t6d": bubble(Path(SSD.bytes_per_s, layered=True)),
        "t6e": bubble(Path(PRINTED["t8b"] * GB)),
        "t7a": _below(reading.compute_s(new + prefix, 0), reading.first_token_s(new, prefix, SSD)),
        "t12a": first(long, Path(SSD_LONG.value * GB)),
        "t12b": first(long, TUTTI),
        "t13a": _below(first(32 * KI, TUTTI), first(32 * KI, GDS)),
        "t13b": _below(first(full, TUTTI), first(full, GDS)),
        "t14a": _below(first(96 * KI, TUTTI), first(96 * KI, DRAM)),
        "t14b": -_below(first(full, TUTTI), first(full, DRAM)),
    }


def _few_tokens(reading: GpuReading) -> Values:
    """t15, t16: a prompt of 32K of which almost everything is stored."""
    tokens = 32 * KI
    bubbles = [
        1e3 * reading.bubble_s(tokens >> power, tokens - (tokens >> power), TUTTI)
        for power in range(1, int(HALVINGS.value) + 1)
    ]
    return {
        **{
            f"t15{letter}": 100 * reading.crossover(tokens, path, STORED)
            for letter, path in zip("abc", (SSD, DRAM, TUTTI), strict=True)
        },
        "t16a": statistics.mean(bubbles),
        "t16b": bubbles[3],
    }


def _counted(model: Model, gpu: Gpu, ssd: Ssd) -> Values:
    """t8, t11, t18, t19, and errors of the review: bytes and rates."""
    pages = 60 * 2**30 // PAGE
    qwen, glm = Model.load("qwen3-32b"), Model.load("glm-4-9b-1m")
    two = ByEvents.on(glm, gpu.times(2), overlay("tutti", FEW_TOKENS))
    layer = 64 * KI * model.shape.kv_bytes_per_token / model.layers
    glm_s = 128 * KI * glm.shape.kv_bytes_per_token / (4 * ssd.read_gb_per_s * GB)
    few = ByEvents.on(model, gpu, overlay("tutti", FEW_TOKENS))
    return {
        "t8c": PRINTED["t8a"] / PRINTED["t8b"],
        "t11a": pages,
        "t11b": pages * LIST / 2**20,
        "t11c": pages * ENTRY / 2**20,
        "t11d": LIST / ENTRY,
        "t18a": 128 * KI // STORED * qwen.layers * 2,
        "t18b": STORED * qwen.kv_heads * qwen.head_dim * 2 / KI,
        "t19a": two.first_token_s(QUESTION.value, 640 * KI, Path(2 * TUTTI.bytes_per_s, layered=True)),
        "t19c": glm_s,
        "t19d": 128 * KI * glm.shape.kv_bytes_per_token / GDS.bytes_per_s,
        "r1a": 1e3 * layer / TUTTI.bytes_per_s,
        "r1b": 1e3 * few.first_token_s(QUESTION.value, 64 * KI, TUTTI),
        "r3a": 128 * KI * model.shape.kv_bytes_per_token / 2**30,
        "r2a": few.first_token_s(16 * KI, 48 * KI, GDS),
        "r2b": few.first_token_s(16 * KI, 48 * KI, Path(DRAM.bytes_per_s)),
        "r4a": 1e3 * 320 * 2048 * OBJECT / (PRINTED["t9a"] * GB),
    }


def evaluate(machine: MachineOptions, simulated: Simulated, with_figures: bool) -> Evaluation:
    """Compute every value: requests alone by events, requests that wait for each other in closed form."""
    model, gpu, _ = machine.profiles("llama-3-8b", "h100", "pcie5")
    many, few = (ByEvents.on(model, gpu, overlay("tutti", name)) for name in ("tutti", FEW_TOKENS))
    queued = GpuReading.on(model, gpu, overlay("tutti"))
    ours = _requests(queued) | _one_request(many) | _few_tokens(few) | _counted(model, gpu, Ssd.load("d7-ps1010"))
    rows = in_drives(GpuReading.on(model, gpu, overlay("tutti", FEW_TOKENS)))
    notes = [
        f"{row['new']} new tokens behind 128K, {DRIVES} drives: {row['load_s']:.2f} s loaded by Tutti, "
        f"{row['in_drives_s']:.2f} s attended to in drives (vcsd eval prefixes)"
        for row in rows
    ]
    return Evaluation(values=ours, more=_by_text(ours) | {"in_drives": rows}, notes=notes)


def in_drives(reading: GpuReading) -> list[dict[str, Any]]:
    """Questions of typical lengths after 128K tokens that are attended to in drives."""
    drives = Drives(INSTCSD_OVERLAPPED, DRIVES, reading.model.shape)
    return list(table_rows(drives, reading, TUTTI, QUESTIONS, (128 * KI,)))


def _by_text(ours: Values) -> dict[str, Any]:
    """The median error of predicted values that the review has, and how many are from either text."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for claim in CLAIMS:
        if claim.kind is ClaimKind.PREDICTED:
            errors[claim.page.endswith(REVIEW)].append(abs(claim.error_percent(ours[claim.id])))
    return {
        "predicted_by_review": len(errors[True]),
        "predicted_by_notes": len(errors[False]),
        "median_error_percent_by_review": statistics.median(errors[True]),
    }


PAPER = Paper(
    name="tutti",
    title="Tutti",
    claims=CLAIMS,
    calibrated=CALIBRATED,
    assumed=ASSUMED,
    evaluate=evaluate,
)
