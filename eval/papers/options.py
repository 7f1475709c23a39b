"""Options common to all papers: machine, extent of the simulation, and number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vcsd_eval.papers.profiles import Gpu, Host, Model

SAMPLED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Simulated:
    """Extent of the simulation, and number of processes."""

    all_layers: Annotated[
        bool, typer.Option("--simulate-all-layers", help="simulate all layers and sequences, not a sample")
    ] = False
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="number of processes (default: one per core, as memory allows)")
    ] = None

    @property
    def sampled_layers(self) -> int | None:
        return None if self.all_layers else SAMPLED_LAYERS


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """Model, GPU and host; the paper's by default."""

    model: Annotated[str | None, typer.Option(help="model profile: a name or a YAML file (default: the paper's)")] = (
        None
    )
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU profile: a name, a name with a count (8xh100), or a YAML file (default: the paper's)"),
    ] = None
    host: Annotated[str | None, typer.Option(help="host profile: a name or a YAML file (default: the paper's)")] = None

    def check(self) -> None:
        """Raise ValueError if a named profile does not exist or is malformed."""
        for load, named in ((Model.load, self.model), (Gpu.some, self.gpu), (Host.load, self.host)):
            if named is not None:
                load(named)

    def profiles(self, model: str, gpu: str, host: str) -> tuple[Model, Gpu, Host]:
        """Profiles named by the options; the arguments, which are the paper's, are the defaults."""
        return Model.load(self.model or model), Gpu.some(self.gpu or gpu), Host.load(self.host or host)


def cell(value: Any) -> str:
    """Text of a figure in a table."""
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
