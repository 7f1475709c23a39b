"""Traces of experiments: every option `--trace` is read here."""

from __future__ import annotations

from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated

import typer

from kv_cache.trace import Trace
from kv_cache.trace_file import load
from vcsd.options import OptionError
from vcsd.progress import note
from vcsd_eval.accuracy.data import find

TRACE_HELP = "trace of requests: CSV, JSON lines or JSON, see docs/traces.md"
TracePath = Annotated[Path | None, typer.Option(help=f"{TRACE_HELP} (default: Mooncake's in $VCSD_DATA)")]
OptionalTrace = Annotated[Path | None, typer.Option(help=f"{TRACE_HELP} (default: generated)")]


def read_trace(path: Path, name: str = "", arrivals: bool = True) -> Trace:
    """Load the trace of --trace, and say on stderr which columns and units were read.

    Args:
        path, name, arrivals: As in `kv_cache.trace_file.load`.

    Raises:
        OptionError: The file is not a trace.
    """
    try:
        trace = load(path, name, arrivals)
    except ValueError as error:
        raise OptionError(f"--trace: {error}") from None
    if parent_process() is None:  # workers load it again
        _say(f"vcsd: trace {path}: {len(trace.requests):,} requests; {trace.source}")
    return trace


@cache
def _say(line: str) -> None:  # once: experiments load a trace for each load
    note(line)


def public_trace(path: Path | None) -> Trace:
    """Load a trace; raises ValueError if no path is given, or if its arrivals are in steps."""
    path = path or find("mooncake")
    if path is None:
        raise OptionError("--trace is missing: name a trace, or a folder with Mooncake's in VCSD_DATA")
    trace = read_trace(path)
    if trace.unit != "s":
        raise OptionError(f"--trace {path}: arrivals must be in seconds, not in engine steps")
    return trace
