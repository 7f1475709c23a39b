"""Options of InstInfer's figures, and the setup that they name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Annotated, Any

import typer

from csd_spec import CompressionBudget
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_drive
from vcsd.options import MAX_COMPRESSION, check_model
from vcsd.progress import progress
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import RayAddress
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs, default_workers, plan, simulate
from vcsd_eval.papers.instinfer.systems import Setup
from vcsd_eval.papers.options import MachineOptions, Simulated, cell
from vcsd_eval.papers.profiles import Ssd
from vcsd_eval.partial_results import ResultCache, fingerprint

Rows = list[dict[str, Any]]
_BEGAN = time.perf_counter()

DriveCount = Annotated[int, typer.Option(min=1, max=1024, help="drives that share the heads")]
EnoughDrives = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="drives that share the heads (default: the smallest number that holds the KV cache)"
    ),
]
DriveCounts = Annotated[str, typer.Option(help="comma-separated numbers of drives")]
BatchSizes = Annotated[str, typer.Option(help="comma-separated batch sizes")]
TRAINED = Path("smollm2")
RecordedModel = Annotated[
    Path | None,
    typer.Option(help="model whose recorded attention gives the pages that SparF reads", callback=check_model),
]
CompressionFactor = Annotated[float, typer.Option(min=1, max=MAX_COMPRESSION, help="C of SparF's and SparQ's 1/C")]


@dataclass(frozen=True, slots=True)
class Sparse:
    """SparF's and SparQ's budget, and a model by whose attention SparF touches pages in one row more."""

    compression: CompressionFactor = 8
    recorded_model: RecordedModel = None


def setup_of(machine: MachineOptions, simulated: Simulated, **more: Any) -> Setup:
    """Setup specified by the options; the paper's for those not given.

    Of the paper's GPU, the smallest number that holds the model is used. more: further fields of the setup.
    """
    model, gpu, host = machine.profiles("opt-13b", "a6000", "pcie4")
    gpu = gpu if machine.gpu else gpu.holding(model.weight_bytes)
    ssd = Ssd.load("980pro")
    return Setup(model=model, gpu=gpu, host=host, ssd=ssd, sampled_layers=simulated.sampled_layers, **more)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep on a Ray cluster, and one that continues after it was killed."""

    ray: RayAddress = None
    progress_dir: Annotated[
        Path | None,
        typer.Option("--checkpoint-dir", help="folder for intermediate results, used to continue a killed run"),
    ] = Path("build/scaling")


def run(
    simulated: Simulated, setup: Setup, cases: Sequence[InStorageCase], how: Sweep = Sweep(progress_dir=None)
) -> Runs:
    """Simulate cases, and show progress."""
    if how.ray and simulated.workers:
        raise ValueError("--workers and --ray cannot be combined: choose local processes or a Ray cluster")
    results = ResultCache(how.progress_dir and how.progress_dir / f"{fingerprint([setup], [])}.jsonl")
    with progress("systems, page by page", len(plan(setup, cases))) as tick:
        runs = simulate(setup, cases, simulated.workers or default_workers(), tick, how.ray, results)
    results.close()
    return runs


@dataclass(frozen=True, slots=True)
class Work:
    """Drives, and tokens stored on them."""

    drive: Annotated[
        Path | None, typer.Option("--drive-config", help="YAML description of the drives (default: the paper's)")
    ] = None
    prompt: Annotated[int, typer.Option("--prompt-tokens", min=1, max=1 << 20, help="tokens per prompt")] = 1024
    new: Annotated[int, typer.Option("--new-tokens", min=2, max=1 << 20, help="new tokens per sequence")] = 1024

    def setup(self, machine: MachineOptions, simulated: Simulated, compression: float = 8) -> Setup:
        """The machine with this work."""
        CompressionBudget(compression)
        spec = load_drive(self.drive) if self.drive else INSTCSD_ZYNQ7045_8CH
        return setup_of(machine, simulated, drive=spec, input=self.prompt, output=self.new, compression=compression)


def rows_outcome(title: str, rows: Rows, columns: Sequence[str], runs: Runs) -> Outcome:
    """Outcome with rows, the columns shown in the terminal, and the cost of the simulation."""
    rss = max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN)) / 2**20
    used = {"wall_s": time.perf_counter() - _BEGAN, "max_rss_gib": rss}
    cells = ([cell(row[column]) for column in columns] for row in rows)
    shown = table(f"{title} ({extent(runs)})", columns, cells, left=("system", "unit", "reason"))
    return Outcome({"rows": rows, **runs.sampled, **used}, [shown])


def extent(runs: Runs) -> str:
    """Origin of the figures: simulated, and from how many layers."""
    layers = runs.sampled.get("layers")
    return f"modelled, {layers['simulated']} of {layers['of']} layers simulated" if layers else "modelled"
