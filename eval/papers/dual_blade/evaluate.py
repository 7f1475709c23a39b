"""Our value for each of Dual-Blade's claims: configurations as policies on the modelled executor, on both SSDs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from vcsd.progress import status
from vcsd_eval.papers.claims import claims_of
from vcsd_eval.papers.dual_blade.constants import ASSUMED, CALIBRATED
from vcsd_eval.papers.dual_blade.machine import PRINTED, READ, WRITE, EdgeSetup, drives, machine
from vcsd_eval.papers.dual_blade.systems import (
    FED_BACK,
    SPLIT_BY_STEP,
    SYSTEMS,
    WITHOUT_PIPELINE,
    DualBladeSystem,
    Inferred,
    alone_ms,
    infer,
    trial_s,
)
from vcsd_eval.papers.dual_blade.wear import waf
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import Chart, Evaluation, Paper, Section

SSDS = ("A", "B")  # Samsung PM9D3a and 990 PRO
ALPHAS = (0.3, 0.5, 0.7)  # share of the layers in Group 1 (Table V)
LIMITS_GIB = (2, 4, 6, 7, 9, 11)
NOTHING_HIT, BETWEEN, ALL_HIT = (
    range(2, 8),
    9,
    (10, 11),
)  # limits in GiB: Baseline's decode reads all miss, partly hit, all hit
SHOWN_GIB = (2, 4, 7, 11)
HALF = 0.5  # alpha at which systems are compared
Values = dict[str, float]


class InferenceRuns:
    """Inferences of a setup; each is simulated on first use."""

    def __init__(self, setup: EdgeSetup) -> None:
        self.setup, self.drives = setup, drives()
        self._made: dict[tuple[Any, ...], Inferred] = {}

    def at(
        self, ssd: str, system: DualBladeSystem, limit_gib: float | None = None, share: float | None = None
    ) -> Inferred:
        """A configuration under a limit, or with a share of the layers cached."""
        key = ssd, system, limit_gib, share
        if key not in self._made:
            self._made[key] = infer(self.setup, system, self.drives[ssd], limit_gib, share)
        return self._made[key]

    def cuts(self, ssd: str) -> list[float]:
        """Reduction of decode time by Dual-Blade, percent, at each limit at which Baseline's cache is an LRU."""
        both = (
            [self.at(ssd, SYSTEMS[name], limit).decode_s for name in ("dual-blade", "baseline")]
            for limit in (*NOTHING_HIT, *ALL_HIT)
        )
        return [100 * (1 - ours / baseline) for ours, baseline in both]


def _sizes(setup: EdgeSetup) -> Values:
    """d1: size of the KV cache, total and per layer."""
    first, last = setup.layer_bytes(setup.input), setup.layer_bytes(setup.final_tokens)
    layers = setup.model.layers
    whole: Values = {"d1a": layers * first / 1e9, "d1b": layers * last / 1e9}
    return whole | {"d1c": first / 2 / 2**20, "d1d": last / 2 / 2**20, "d1e": setup.row_bytes / 2**10}


def _baseline(runs: InferenceRuns) -> Values:
    """d4, d6: Baseline's cache hits and time breakdown. On SSD A, since III-A does not name the SSD."""
    low, between, high = (runs.at("A", SYSTEMS["baseline"], limit) for limit in (NOTHING_HIT[0], BETWEEN, ALL_HIT[-1]))
    hits = [100 * (system.hit_share or 0.0) for system in (high, between)]
    most = max(100 * (runs.at("A", SYSTEMS["baseline"], limit).hit_share or 0.0) for limit in NOTHING_HIT)
    shares = [
        100 * run.decode_s / (run.decode_s + run.prefill_s / (PRINTED[computed] / 100))
        for run, computed in ((high, "d5a"), (low, "d5c"))
    ]
    return {
        **dict(zip(("d4a", "d4b"), hits, strict=True)),
        "d4c": most,
        **dict(zip(("d6a", "d6b"), shares, strict=True)),
        "d6c": 100 * high.copying_share,
        "d6d": 100 * low.faulting_share,
    }


def _prefill(runs: InferenceRuns) -> Values:
    """d7: Dual-Blade's prefill, which hides its writes, over Baseline's, whose fraction d5c is not I/O."""
    values: Values = {}
    for name, ssd in zip(("d7a", "d7b"), SSDS, strict=True):
        run = runs.at(ssd, SYSTEMS["dual-blade"], NOTHING_HIT[0])
        values[name] = 100 * (1 - run.prefill_s / (runs.setup.prefill_gpu_s / (PRINTED["d5c"] / 100)))
    return values


def _tensors(runs: InferenceRuns) -> Values:
    """d10: a tensor alone on SSD A. d14, d15: results of Table IV's times of tensors."""
    setup = runs.setup
    one = machine(setup, runs.drives["A"], None)
    mean_tokens = (setup.input + setup.final_tokens - 1) / 2
    d = PRINTED
    return {
        "d10a": alone_ms(one, WRITE, setup.input * setup.row_bytes),
        "d10c": alone_ms(one, READ, round(mean_tokens * setup.row_bytes)),
        "d10e": alone_ms(one, WRITE, setup.row_bytes),
        "d14a": d["d9a"] / d["d10a"],
        "d14b": 100 * (1 - d["d10e"] / d["d9e"]),
        "d14c": 100 * (1 - d["d12e"] / d["d11e"]),
        "d15a": d["d9a"] / d["d10a"],
        "d15b": d["d9c"] / d["d10c"],
        "d15c": d["d11a"] / d["d12a"],
        "d15d": d["d11c"] / d["d12c"],
    }


def _decodes(runs: InferenceRuns) -> Values:
    """d8, d16, d17, d19."""
    values: Values = {}
    for (least, most), ssd in zip((("d8a", "d8b"), ("d8c", "d8d")), SSDS, strict=True):
        values |= {least: min(runs.cuts(ssd)), most: max(runs.cuts(ssd))}
    for name, ssd in zip(("d16", "d17"), SSDS, strict=True):
        both = product((WITHOUT_PIPELINE, SYSTEMS["dual-blade"]), ALPHAS)
        for letter, (system, alpha) in zip("abcdef", both, strict=True):
            values[name + letter] = runs.at(ssd, system, share=alpha).decode_s
    trial = trial_s(runs.setup, runs.drives["A"], HALF)
    assert trial, "half of the layers are in Group 1"
    for name, seconds, token in zip(("d19a", "d19b"), trial, (1, 2), strict=True):
        values[name] = runs.setup.layer_bytes(runs.setup.input + token) / seconds / 1e9
    return values


def _printed() -> Values:
    """d18: time that P.P saves in Table V. d20y: result of Table VI."""
    d = PRINTED
    values: Values = {"d20y": d["d20r"] / d["d20q"]}
    for name, (least, most) in (("d16", ("d18a", "d18b")), ("d17", ("d18c", "d18d"))):
        saved = [100 * (1 - d[name + after] / d[name + before]) for before, after in ("ad", "be", "cf")]
        values |= {least: min(saved), most: max(saved)}
    return values


def runs_on(machine: MachineOptions) -> InferenceRuns:
    """Inferences on a machine, the paper's by default."""
    model, gpu, host = machine.profiles("opt-6.7b", "rtx5060ti-16gb", "pcie5x8")
    return InferenceRuns(EdgeSetup(model=model, gpu=gpu, host=host))


def evaluate(machine: MachineOptions, simulated: Simulated, with_figures: bool) -> Evaluation:
    """Run all configurations needed by claims and comparisons, and those at further limits that figures need."""
    runs = runs_on(machine)
    with status("configurations under limits"):
        parts = (_printed(), _sizes(runs.setup), _baseline(runs), _prefill(runs), _tensors(runs), _decodes(runs))
        ours = {name: value for part in parts for name, value in part.items()} | {"d21": waf()}
        more = _compared(runs)
        sections = _sections(runs) if with_figures else []
    notes = [f"split over dual-blade at alpha {HALF}, SSD {ssd}: {worth:.2f}x" for ssd, worth in more[OVER].items()]
    gains = more["split_by_step"]["dual-blade, a layer ahead"].items()
    ahead = ", ".join(f"{worth:.2f}x on SSD {ssd}" for ssd, worth in gains)
    notes.append(f"split is at one memory size and reads a layer ahead; by that alone Dual-Blade gains {ahead}")
    return Evaluation(values=ours, more=more, notes=notes, sections=sections)


OVER = "ours_over_dual_blade"


def _compared(runs: InferenceRuns) -> dict[str, Any]:
    """Systems at some limits; split pairs over Dual-Blade at alpha 0.5, and the steps between them."""

    def over_dual_blade(ssd: str, system: DualBladeSystem) -> float:
        return runs.at(ssd, SYSTEMS["dual-blade"], share=HALF).decode_s / runs.at(ssd, system, share=HALF).decode_s

    saved = {
        ssd: [
            100 * (1 - runs.at(ssd, SYSTEMS["dual-blade"], share=alpha).decode_s / without.decode_s)
            for alpha in ALPHAS
            if (without := runs.at(ssd, WITHOUT_PIPELINE, share=alpha))
        ]
        for ssd in SSDS
    }
    return {
        OVER: {ssd: over_dual_blade(ssd, SYSTEMS["split"]) for ssd in SSDS},
        "split_by_step": {
            name: {ssd: over_dual_blade(ssd, system) for ssd in SSDS} for name, system in SPLIT_BY_STEP.items()
        },
        "cache_smaller_than_planned": _smaller(runs),
        "pipeline_saves_percent": saved,
        "configurations": _rows(runs, SHOWN_GIB),
    }


def _smaller(runs: InferenceRuns) -> dict[str, dict[str, float]]:
    """Decode time, seconds, if half of the KV data should be cached and the cache holds one layer in eight less."""
    setup = runs.setup
    smaller = HALF * setup.model.layers * 7 / 8
    limit_gib = setup.limit_gib(int(smaller * setup.layer_bytes(setup.final_tokens)))
    systems = {"dual-blade": SYSTEMS["dual-blade"], "split": SYSTEMS["split"], "split, fed back": FED_BACK}
    return {
        name: {ssd: runs.at(ssd, system, limit_gib, HALF).decode_s for ssd in SSDS} for name, system in systems.items()
    }


def _rows(runs: InferenceRuns, limits: Sequence[int]) -> list[dict[str, Any]]:
    every = product(SSDS, SYSTEMS, limits)
    points = [(ssd, name, limit, runs.at(ssd, SYSTEMS[name], limit)) for ssd, name, limit in every]
    return [
        {"ssd": ssd, "system": name, "limit_gib": limit, "decode_s": run.decode_s, "cached_share": run.cached_share}
        for ssd, name, limit, run in points
    ]


def _sections(runs: InferenceRuns) -> list[Section]:
    """Decode over the limit, as in figure 10."""
    rows = _rows(runs, LIMITS_GIB)
    units = {"limit_gib": "memory limit, GiB", "decode_s": "decode time, s"}
    by_ssd = {ssd: [row for row in rows if row["ssd"] == ssd] for ssd in SSDS}
    return [
        Section(f"Decode, SSD {ssd}", Chart("lines", points, "limit_gib", ("decode_s",), "system", units))
        for ssd, points in by_ssd.items()
    ] + [Section("", rows=rows, columns=("ssd", "system", "limit_gib", "decode_s", "cached_share"))]


PAPER = Paper(
    name="dual-blade",
    title="Dual-Blade",
    claims=claims_of("dual-blade"),
    calibrated=CALIBRATED,
    assumed=ASSUMED,
    evaluate=evaluate,
)
