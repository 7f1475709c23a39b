"""`vcsd drive record`, `replay`: block traces in MQSim's text format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcsd.options import MAX_COMPRESSION
from vcsd.progress import status
from vcsd_cli.shared import ATTENTION_HELP, Output, OutputOption, show


def replay(
    file: Annotated[Path, typer.Argument(help="trace: time_ns device lba sectors op on each line")],
    preset: Annotated[str, typer.Option(help="preset of a conventional SSD")] = "nvmevirt-970pro",
    output: OutputOption = Output.NORMAL,
) -> None:
    """Print simulated latencies of a block trace (MQSim's text format) on a conventional SSD."""
    from csd_spec.presets import BLOCK_SSDS
    from vcsd_eval.bench.block_trace import replay_file

    if preset not in BLOCK_SSDS:
        raise ValueError(f"preset = {preset!r}: must be one of {', '.join(BLOCK_SSDS)}")
    show(f"replay, {file.name}", replay_file(file, BLOCK_SSDS[preset]), output)


def record(
    file: Annotated[Path, typer.Argument(help="file to write")],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 16, help="prompt length")] = 1024,
    steps: Annotated[int, typer.Option(min=0, max=4096, help="decode steps")] = 16,
    attention: Annotated[str, typer.Option("--method", help=ATTENTION_HELP)] = "sparf",
    compression: Annotated[float, typer.Option(min=1, max=MAX_COMPRESSION, help="use 1/C of the KV data")] = 8,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Write the flash requests of a drive while a sequence decodes, as a block trace."""
    from vcsd_eval.bench.block_trace import record as record_requests

    with status("decoding"):
        result = record_requests(file, tokens, steps, attention, compression)
    show("record", result, output)
