"""Options shared by commands and experiments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from csd_io.folder import Durability
from csd_io.medium import BLOCK, Kind, Medium
from csd_link.hosting import MAX_MIB, MAX_THREADS, HostingOptions
from csd_spec.checked import Whole, frozen_value
from vcsd.models import find_model

MAX_SEED = (1 << 32) - 1  # limit of all random number generators used
MAX_COMPRESSION = 1024.0
MAX_TOKENS_HELP = "prompt and answer of a request, tokens (default: the model's context, at most 4096)"


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


@frozen_value
class ServingLimits:
    """Batches and queue of a server."""

    max_batch_size: Annotated[Whole, Field(ge=1, le=256, description="requests that decode at once")] = 4
    max_tokens: Annotated[Whole | None, Field(ge=1, le=1 << 24, description=MAX_TOKENS_HELP)] = None
    max_queued_requests: Annotated[
        Whole, Field(ge=1, le=1 << 20, description="requests without a first token; others are rejected (status 429)")
    ] = 128
    prefill_chunk_tokens: Annotated[
        Whole, Field(ge=0, le=1 << 24, description="prefill chunk per decode step, tokens; 0: whole prompts")
    ] = 0
    time_slice_tokens: Annotated[
        Whole, Field(ge=1, le=1 << 20, description="length of a time slice, tokens, for policies with time slices")
    ] = 32


@dataclass(frozen=True, slots=True)
class HostingCliOptions:
    """Resources of this machine for drives; None: as in the drives' configuration, or the default."""

    durability: Annotated[
        Durability | None,
        typer.Option(
            "--durability", help="event that flushed data survives: process exit (default), or host power loss"
        ),
    ] = None
    medium: Annotated[
        Kind | None, typer.Option(help="storage of flash pages: memory (default), or the drives' files")
    ] = None
    page_buffer_mib: Annotated[
        int | None,
        typer.Option("--page-buffer-mib", min=1, max=MAX_MIB, help="DRAM for pages of all direct drives, MiB"),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=MAX_THREADS, help="kernel threads per drive (default: cores / drives)"),
    ] = None

    def override(self, said: HostingOptions, drives: int) -> dict[str, Any]:
        """Fields of one of `drives` drives: these options, or the configuration's values if unset."""
        cache_bytes = None if self.page_buffer_mib is None else max(BLOCK, (self.page_buffer_mib << 20) // drives)
        medium = Medium(self.medium or said.medium.kind, cache_bytes or said.medium.cache_bytes)
        fields = {"durability": self.durability or said.durability, "threads": self.threads or said.threads}
        return fields | {"medium": medium}
