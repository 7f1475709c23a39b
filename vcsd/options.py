"""Options that commands and experiments share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_io.folder import Durability
from csd_io.medium import BLOCK, Kind, Medium
from csd_link.hosted import MAX_MIB, MAX_THREADS, Hosted
from ftl import LAYOUTS
from vcsd.models import find_model

MAX_SEED = (1 << 32) - 1  # what every generator of random numbers takes
MAX_COMPRESSION = 1024.0


def check_model(path: Path | None) -> Path | None:
    """The folder of a model, by its folder or its name; raises ValueError for anything else, before anything that takes
    long is imported."""
    return path and find_model(path)


def check_text(path: Path | None) -> Path | None:
    """Raise OSError or ValueError for a file that cannot be read as text."""
    if path:
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    return path


ModelFolder = Annotated[
    Path | None, typer.Option(help="folder of a decoder, or smollm2 (default: the shipped one)", callback=check_model)
]
MethodsFile = Annotated[
    Path | None, typer.Option("--methods", help="Python file with custom attention methods", callback=check_text)
]

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


@dataclass(frozen=True, slots=True)
class Hosting:
    """What drives are given of this machine; None is what their file says, or the default."""

    durability: Annotated[
        Durability | None,
        typer.Option(help="what a flush outlives: process, the drive's own (the default); host, a power cut too"),
    ] = None
    medium: Annotated[
        Kind | None, typer.Option(help="where flash pages are: memory (the default), or the drives' files")
    ] = None
    host_memory_mib: Annotated[
        int | None, typer.Option(min=1, max=MAX_MIB, help="pages that a direct medium keeps, of all drives")
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, max=MAX_THREADS, help="of each drive (default: drives share the cores)")
    ] = None

    def over(self, said: Hosted, drives: int) -> dict[str, Any]:
        """What was asked for, else what was said, as fields of one of so many drives."""
        kept = None if self.host_memory_mib is None else max(BLOCK, (self.host_memory_mib << 20) // drives)
        medium = Medium(self.medium or said.medium.kind, kept or said.medium.cache_bytes)
        fields = {"durability": self.durability or said.durability, "threads": self.threads or said.threads}
        return fields | {"medium": medium}
