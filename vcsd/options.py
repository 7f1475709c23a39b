"""Options that commands and experiments share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from csd_io.folder import Durability
from ftl import LAYOUTS

MAX_SEED = (1 << 32) - 1  # what every generator of random numbers takes
MAX_COMPRESSION = 1024.0

ModelFolder = Annotated[Path | None, typer.Option(help="folder of a decoder (default: the shipped one)")]
MethodsFile = Annotated[Path | None, typer.Option("--methods", help="Python file with methods of your own")]

_NAMES = {layout.name: number for number, layout in LAYOUTS.items()}
LAYOUT_HELP = "of K and V in flash, by name or number (default: fp16, or what the method's name says)"


def _layout(text: object) -> int:
    """The number of a layout that our drives have; text: its name, or that number."""
    found = _NAMES.get(str(text), next((number for number in LAYOUTS if str(number) == str(text)), None))
    if found is None:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(_NAMES)}")
    return found


LayoutOption = Annotated[
    int | None,
    typer.Option("--layout", "--embedding-bits", parser=_layout, metavar=f"[{'|'.join(_NAMES)}]", help=LAYOUT_HELP),
]

DURABILITY_HELP = "what a flush outlives: process, the drive's own; host, a power cut of this machine too"
DurabilityOption = Annotated[Durability, typer.Option("--durability", help=DURABILITY_HELP)]
