"""Options of the paper's evaluation, and the setup that they name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Annotated, Any

import typer

from csd_spec import Compression
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from eval.experiment import Outcome
from eval.papers.instinfer.runs import Case, Runs, count_ticks, default_workers, simulate
from eval.papers.instinfer.systems import SAMPLED_LAYERS, Setup
from eval.papers.profiles import Gpu, Host, Model, Ssd
from nvmevirt_config import load_drive
from vcsd.options import MAX_COMPRESSION
from vcsd.progress import progress
from vcsd.tables import table

Rows = list[dict[str, Any]]
_BEGAN = time.perf_counter()

DriveCount = Annotated[int, typer.Option(min=1, max=1024, help="drives that share the KV heads")]
DriveCounts = Annotated[str, typer.Option(help="numbers of drives, with commas")]
BatchSizes = Annotated[str, typer.Option(help="batch sizes, with commas")]
CompressionFactor = Annotated[float, typer.Option(min=1, max=MAX_COMPRESSION, help="C of SparF's and SparQ's 1/C")]


@dataclass(frozen=True, slots=True)
class Simulated:
    """How much of what is wanted is simulated, and by how many."""

    all_layers: Annotated[
        bool, typer.Option("--all-layers", help=f"simulate steps of all layers, not of {SAMPLED_LAYERS}")
    ] = False
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="processes (default: a core each)")] = None

    def run(self, setup: Setup, cases: Sequence[Case]) -> Runs:
        """Simulate cases, and show how far that is."""
        with progress("steps, page by page", count_ticks(setup, cases)) as tick:
            return simulate(setup, cases, self.workers or default_workers(), tick)

    @property
    def sampled_layers(self) -> int | None:
        return None if self.all_layers else SAMPLED_LAYERS


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a GPU and a host."""

    model: Annotated[str, typer.Option(help="model profile: a name or a YAML file")] = "opt-13b"
    gpu: Annotated[str, typer.Option(help="GPU profile: a name or a YAML file")] = "a6000"
    host: Annotated[str, typer.Option(help="host profile: a name or a YAML file")] = "pcie4"

    def setup(self, simulated: Simulated, **more: Any) -> Setup:
        """The setup that these options name; more: its other fields."""
        model, gpu = Model.load(self.model), Gpu.load(self.gpu)
        host, ssd = Host.load(self.host), Ssd.load("980pro")
        return Setup(model=model, gpu=gpu, host=host, ssd=ssd, sampled_layers=simulated.sampled_layers, **more)


@dataclass(frozen=True, slots=True)
class Work:
    """What is stored where."""

    drive: Annotated[Path | None, typer.Option(help="YAML description of the drives (default: the paper's)")] = None
    prompt: Annotated[int, typer.Option("--input", min=1, max=1 << 20, help="tokens of a prompt")] = 1024
    new: Annotated[
        int, typer.Option("--output-tokens", "--output", min=2, max=1 << 20, help="new tokens of a sequence")
    ] = 1024

    def setup(self, machine: Machine, simulated: Simulated, compression: float = 8) -> Setup:
        """The machine with this work."""
        Compression(compression)
        spec = load_drive(self.drive) if self.drive else INSTCSD_ZYNQ7045_8CH
        return machine.setup(simulated, drive=spec, input=self.prompt, output=self.new, compression=compression)


def rows_outcome(title: str, rows: Rows, columns: Sequence[str], runs: Runs) -> Outcome:
    """Rows, which of their columns are for people, and what working them out took."""
    rss = max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN)) / 2**20
    used = {"wall_s": time.perf_counter() - _BEGAN, "max_rss_gib": rss}
    cells = ([cell(row[column]) for column in columns] for row in rows)
    shown = table(f"{title} ({extent(runs)})", columns, cells, left=("system", "unit", "reason"))
    return Outcome({"rows": rows, **runs.sampled, **used}, [shown])


def extent(runs: Runs) -> str:
    """What the figures are: modelled, and from how many layers."""
    layers = runs.sampled.get("layers")
    return f"modelled, {layers['simulated']} of {layers['of']} layers simulated" if layers else "modelled"


def cell(value: Any) -> str:
    """A figure for people."""
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
