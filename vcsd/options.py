"""Options shared by commands and experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from csd_spec.checked import Whole, frozen_part
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


@frozen_part
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
