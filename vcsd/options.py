"""Options that commands and experiments share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from csd_io.folder import Durability

MAX_SEED = (1 << 32) - 1  # what every generator of random numbers takes
MAX_COMPRESSION = 1024.0

ModelFolder = Annotated[Path | None, typer.Option(help="folder of a decoder (default: the shipped one)")]
MethodsFile = Annotated[Path | None, typer.Option("--methods", help="Python file with methods of your own")]

DURABILITY_HELP = "what a flush outlives: process, the drive's own; host, a power cut of this machine too"
DurabilityOption = Annotated[Durability, typer.Option("--durability", help=DURABILITY_HELP)]
