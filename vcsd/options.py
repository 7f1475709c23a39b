"""Options that commands and experiments share."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_io.folder import Durability
from csd_io.medium import BLOCK, Kind, Medium
from csd_link.hosted import MAX_MIB, MAX_THREADS, HostingOptions
from csd_spec.layouts import load_layouts, name_of
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


def _loaded(path: Path | None) -> Path | None:
    """A file of layouts, which is loaded before --layout is looked up."""
    load_layouts(check_text(path))
    return path


LayoutsFile = Annotated[
    Path | None,
    typer.Option("--layouts", help="Python file with custom layouts of the KV data", callback=_loaded, is_eager=True),
]
LAYOUT_HELP = "layout of the KV data in flash, see docs/layouts.md (default: the method's, or fp16)"


def _layout(text: object) -> str:
    """The name of a layout; text: that, or its code, which earlier releases took (`--embedding-bits 16`)."""
    with warnings.catch_warnings(record=True) as deprecated:
        warnings.simplefilter("always")
        try:
            name = name_of(str(text))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    for each in deprecated:
        typer.echo(f"vcsd: warning: {each.message}", err=True)
    return name


LayoutOption = Annotated[
    str | None, typer.Option("--layout", "--embedding-bits", parser=_layout, metavar="NAME", help=LAYOUT_HELP)
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

    def over(self, said: HostingOptions, drives: int) -> dict[str, Any]:
        """What was asked for, else what was said, as fields of one of so many drives."""
        kept = None if self.host_memory_mib is None else max(BLOCK, (self.host_memory_mib << 20) // drives)
        medium = Medium(self.medium or said.medium.kind, kept or said.medium.cache_bytes)
        fields = {"durability": self.durability or said.durability, "threads": self.threads or said.threads}
        return fields | {"medium": medium}
