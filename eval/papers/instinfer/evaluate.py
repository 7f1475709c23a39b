"""Our value for each of InstInfer's claims: serial, overlapped, with recorded pages; and what our methods are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from vcsd.progress import status
from vcsd_eval.papers.claims import claims_of
from vcsd_eval.papers.instinfer import figures
from vcsd_eval.papers.instinfer.constants import ASSUMED, CALIBRATED, ENGINE
from vcsd_eval.papers.instinfer.options import extent, run, setup_of
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs, simulate
from vcsd_eval.papers.instinfer.systems import (
    BATCHED_DENSE,
    DENSE,
    OURS,
    PAGED,
    SPARF,
    InStorageSystem,
    Result,
    Setup,
)
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import Evaluation, Paper


def _over(a: Result, b: Result) -> float:
    return a.tokens_per_s / b.tokens_per_s


# How a claim follows from runs: host(system, batch), drive(kind, batch, drives)
VALUES: Mapping[str, Callable[[Any, Any], float]] = {
    "c1": lambda h, d: _over(d("Dense", 64), h("FlexGen", 64)),
    "c2": lambda h, d: _over(d("SparF", 256), d("Dense", 256)),
    "c3": lambda h, d: _over(d("SparF", 256), h("FlexGen", 32)),
    "c4": lambda h, d: _over(d("Dense", 256), h("DeepSpeed", 16)),
    "c5": lambda h, d: _over(h("DeepSpeed", 16), h("DeepSpeed", 32)),
    "c6": lambda h, d: _over(d("Dense", 256, 2), h("FlexGen", 32)),
    "c7": lambda h, d: _over(d("SparF", 256, 2), h("FlexGen-SparQ", 32)),
    "c8a": lambda h, d: 100 * h("FlexGen", 64).step.kv_share,
    "c8b": lambda h, d: 100 * d("Dense", 64).step.kv_share,
    "c8c": lambda h, d: 100 * d("Dense", 64, 2).step.kv_share,
    "c9a": lambda h, d: 100 * h("FlexGen-SparQ", 64).step.kv_share,
    "c9b": lambda h, d: 100 * d("SparF", 64).step.kv_share,
    "c9c": lambda h, d: 100 * d("SparF", 64, 2).step.kv_share,
    "c10a": lambda h, d: 100 * (1 - d("Dense", 64).step.kv_s / h("FlexGen", 64).step.kv_s),
    "c10b": lambda h, d: 100 * (1 - d("Dense", 64, 2).step.kv_s / h("FlexGen", 64).step.kv_s),
    "c11a": lambda h, d: _over(d("Dense", 256, 20), d("Dense", 256)),
    "c11b": lambda h, d: _over(d("SparF", 256, 20), d("SparF", 256)),
    "c12": lambda h, d: float(
        bool(h("FlexGen", 128).reason) and not h("FlexGen", 64).reason and not d("Dense", 256).reason
    ),
}
_RATES = "vcsd eval throughput --batch-sizes {} --drives {}"
COMMANDS = {  # that show the runs of a value
    "c1": _RATES.format(64, 1),
    "c2": _RATES.format(256, 1),
    "c3": _RATES.format("32,256", 1),
    "c4": _RATES.format("16,256", 1),
    "c5": _RATES.format("16,32", 1),
    "c6": _RATES.format("32,256", 2),
    "c7": _RATES.format("32,256", 2),
    **dict.fromkeys(("c8a", "c8b", "c9a", "c9b", "c10a"), "vcsd eval breakdown"),
    **dict.fromkeys(("c8c", "c9c", "c10b"), "vcsd eval breakdown --drives 2"),
    **dict.fromkeys(("c11a", "c11b"), "vcsd eval scaling"),
    "c12": _RATES.format("64,128,256", 1),
    "c13": "vcsd eval claims",
}
OVERLAPPED = {
    system: replace(system, name=f"{system.name}, overlapped", schedule="overlapped") for system in (DENSE, SPARF)
}
PLACES = ((64, 1), (64, 2), (256, 1), (256, 2), (256, 20))


UNLIKE = (
    "ratios over InstI compare unlike systems: InstI is serial with a call for each sequence and layer, ours is "
    "overlapped with batched commands; output errors differ too (vcsd eval methods)"
)


def _recorded(page_share: float) -> InStorageSystem:
    """SparF that reads the recorded number of pages."""
    return replace(SPARF, name="InstI-SparF, recorded", page_share=page_share)


def cases(recorded_page_share: float) -> list[InStorageCase]:
    """Cases needed by `claimed`."""
    systems = (DENSE, SPARF, _recorded(recorded_page_share), *OVERLAPPED.values())
    return [
        InStorageCase(
            (*systems, BATCHED_DENSE, PAGED, OURS) if batch == 256 and drives in (1, 20) else systems, batch, drives
        )
        for batch, drives in PLACES
    ]


def claimed(runs: Runs, share: float, model: str) -> Evaluation:
    """Ours for every claim: in the serial schedule, overlapped, and with a recorded page share; our methods."""
    serial = _drives(runs, {"Dense": DENSE, "SparF": SPARF})
    overlapped = _drives(runs, {"Dense": OVERLAPPED[DENSE], "SparF": OVERLAPPED[SPARF]})
    recorded = _drives(runs, {"Dense": DENSE, "SparF": _recorded(share)})
    methods, ours = _methods(runs), _ours(runs)
    return Evaluation(
        values=_values(runs, runs.host, serial),
        columns={
            "ours_overlapped": _values(runs, runs.host, overlapped),
            "recorded_pages": _values(runs, runs.host, recorded),
        },
        more={
            "page_share": {"paper": runs.setup.constants.token_page_share, "recorded": share, "of": model},
            "methods": methods,
            "ours": ours,
            "realtime_factor": serial("Dense", 256).realtime_factor,
            **runs.sampled,
        },
        notes=[*(f"{name}: {_figures(worth)}" for name, worth in {**methods, "ours": ours}.items()), UNLIKE],
        extent=extent(runs),
    )


def _values(runs: Runs, host: Any, drive: Any) -> dict[str, float]:
    return {name: value(host, drive) for name, value in VALUES.items()} | {"c13": _pcie(runs.setup)}


def _figures(worth: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in worth.items() if isinstance(value, float))


def _drives(runs: Runs, systems: dict[str, InStorageSystem]) -> Callable[..., Result]:
    """drive(kind, batch, drives) for a claim's value."""

    def drive(kind: str, batch: int, drives: int = 1) -> Result:
        return runs.drive(systems[kind], batch, drives)

    return drive


def _methods(runs: Runs) -> dict[str, dict[str, Any]]:
    """Gain of batched, overlapped commands over the paper's systems: whole pages of 4 bits, and dense."""
    paged, dense = runs.drive(PAGED, 256), runs.drive(BATCHED_DENSE, 256)
    return {
        "paged": {
            "over_instinfer_sparf": _over(paged, runs.drive(SPARF, 256)),
            "over_1_drive_at_20": _over(runs.drive(PAGED, 256, 20), paged),
            "step_s_20_drives": asdict(runs.drive(PAGED, 256, 20).step),
        },
        "dense": {
            "over_instinfer_dense": _over(dense, runs.drive(DENSE, 256)),
            "over_1_drive_at_20": _over(runs.drive(BATCHED_DENSE, 256, 20), dense),
        },
    }


def _ours(runs: Runs) -> dict[str, Any]:
    """Pages of progressive precision compared with the paper's systems, at the default setting of `ours`."""
    one, many = runs.drive(OURS, 256), runs.drive(OURS, 256, 20)
    return {
        "method": OURS.method,
        "layout": OURS.layout,
        "compression": OURS.compression,
        "convention": OURS.convention,
        "over_insti_sparf_bs256": _over(one, runs.drive(SPARF, 256)),
        "over_insti_dense_bs256": _over(one, runs.drive(DENSE, 256)),
        "scaling_20_sparse": _over(many, one),
        "step_s": asdict(one.step),
        "units_s": one.units_s,
        "step_s_20_drives": asdict(many.step),
        "units_s_20_drives": many.units_s,
    }


def _pcie(setup: Setup) -> float:
    """c13: bytes over PCIe in decode, KV offloading over attention in storage."""
    tokens, shape = float(setup.steps.mean()), setup.model.shape
    in_storage_bytes = shape.layers * (64 + 2 * shape.head_dim * (2 * shape.q_heads + 2 * shape.kv_heads))
    return setup.kv_bytes(1, tokens) / in_storage_bytes


def evaluate(machine: MachineOptions, simulated: Simulated, with_figures: bool) -> Evaluation:
    """Simulate the cases needed by the claims, and the figures if they are requested."""
    return evaluate_on(setup_of(machine, simulated), simulated, with_figures)


def evaluate_on(setup: Setup, simulated: Simulated, with_figures: bool) -> Evaluation:
    """The same on a setup."""
    with status("recording attention"):
        from vcsd_eval.papers.instinfer.page_shares import recorded_shares, scaled

        touched = recorded_shares(setup, [*figures.COMPRESSIONS, 8.0] if with_figures else [8.0])
    recorded, shares = touched.by_compression[8.0], scaled(setup, touched.by_compression)
    runs = run(simulated, setup, [*cases(recorded), *(figures.cases(shares) if with_figures else [])])
    evaluation = claimed(runs, recorded, touched.model)
    return replace(evaluation, sections=figures.sections(runs, shares)) if with_figures else evaluation


def values() -> dict[str, float]:
    """Ours for every claim."""
    setup = setup_of(MachineOptions(), Simulated())
    engine = setup.drive.engine
    rated = replace(engine, kernel_efficiency=min(1.0, ENGINE.value / (engine.kernels * engine.lanes)))
    setup = replace(setup, drive=replace(setup.drive, engine=rated))
    cases = [InStorageCase((DENSE, SPARF), *place) for place in PLACES]
    runs = simulate(setup, cases)
    return _values(runs, runs.host, _drives(runs, {"Dense": DENSE, "SparF": SPARF}))


PAPER = Paper(
    name="instinfer",
    title="InstInfer",
    claims=claims_of("instinfer"),
    calibrated=CALIBRATED,
    assumed=ASSUMED,
    evaluate=evaluate,
    commands=COMMANDS,
    values=values,
)
