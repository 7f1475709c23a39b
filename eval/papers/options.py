"""Options that all papers have: the machine, how much is simulated, and figures for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from eval.papers.profiles import Gpu, Host, Model

SAMPLED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Simulated:
    """How much of what is wanted is simulated, and by how many."""

    all_layers: Annotated[
        bool, typer.Option("--simulate-all-layers", help="simulate all layers and sequences, not a sample")
    ] = False
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="processes (default: a core each)")] = None

    @property
    def sampled_layers(self) -> int | None:
        return None if self.all_layers else SAMPLED_LAYERS


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """A model on a GPU and a host, each the paper's where it is not said."""

    model: Annotated[str | None, typer.Option(help="model profile: a name or a YAML file (default: the paper's)")] = (
        None
    )
    gpu: Annotated[
        str | None, typer.Option(help="GPU profile: a name, as many as 8xh100, or a YAML file (default: the paper's)")
    ] = None
    host: Annotated[str | None, typer.Option(help="host profile: a name or a YAML file (default: the paper's)")] = None

    def profiles(self, model: str, gpu: str, host: str) -> tuple[Model, Gpu, Host]:
        """Those that these options name, or else these, the paper's."""
        return Model.load(self.model or model), Gpu.some(self.gpu or gpu), Host.load(self.host or host)


def cell(value: Any) -> str:
    """A figure for people."""
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
