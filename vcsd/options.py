"""Options shared by commands and experiments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_io.folder import Durability
from csd_io.medium import BLOCK, Kind, Medium
from csd_link.hosting import MAX_MIB, MAX_THREADS, HostingOptions
from csd_spec.layouts import layout_named, load_layouts
from vcsd.models import find_model

MAX_SEED = (1 << 32) - 1  # limit of all random number generators used
MAX_COMPRESSION = 1024.0


class OptionError(ValueError):
    """A value of an option that cannot be used; the message names the option. The exit code is 2."""


def check_model(path: Path | None) -> Path | None:
    """Folder of a model, by path or name; raises ValueError early, before slow imports."""
    return path and find_model(path)


def check_text(path: Path | None) -> Path | None:
    """Raise OSError or ValueError if a file cannot be read as UTF-8 text."""
    if path:
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    return path


ModelFolder = Annotated[
    Path | None,
    typer.Option(help="folder or name of a decoder, e.g. smollm2 (default: the bundled one)", callback=check_model),
]
MethodsFile = Annotated[
    Path | None, typer.Option("--methods-file", help="Python file with custom attention methods", callback=check_text)
]


def _loaded(path: Path | None) -> Path | None:
    """Load a file of layouts before --layout is parsed."""
    load_layouts(check_text(path))
    return path


LayoutsFile = Annotated[
    Path | None,
    typer.Option("--layouts", help="Python file with custom KV layouts", callback=_loaded, is_eager=True),
]
LAYOUT_HELP = "KV layout in flash, see docs/layouts.md (default: the method's, or fp16)"


def _layout(text: object) -> str:
    """Name of a layout that exists."""
    try:
        return layout_named(str(text)).name
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("layout = ")) from error


LayoutOption = Annotated[str | None, typer.Option("--layout", parser=_layout, metavar="NAME", help=LAYOUT_HELP)]


@dataclass(frozen=True, slots=True)
class HostingCliOptions:
    """Resources of this machine for drives; None: as in the drives' configuration, or the default."""

    durability: Annotated[
        Durability | None,
        typer.Option(
            "--flush-durability", help="event that flushed data survives: process exit (default), or host power loss"
        ),
    ] = None
    medium: Annotated[
        Kind | None, typer.Option(help="storage of flash pages: memory (default), or the drives' files")
    ] = None
    host_memory_mib: Annotated[
        int | None,
        typer.Option("--page-buffer-mib", min=1, max=MAX_MIB, help="DRAM for pages of all direct drives, MiB"),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            "--kernel-threads", min=1, max=MAX_THREADS, help="kernel threads per drive (default: cores / drives)"
        ),
    ] = None

    def override(self, said: HostingOptions, drives: int) -> dict[str, Any]:
        """Fields of one of `drives` drives: these options, or the configuration's values if unset."""
        cache_bytes = None if self.host_memory_mib is None else max(BLOCK, (self.host_memory_mib << 20) // drives)
        medium = Medium(self.medium or said.medium.kind, cache_bytes or said.medium.cache_bytes)
        fields = {"durability": self.durability or said.durability, "threads": self.threads or said.threads}
        return fields | {"medium": medium}
