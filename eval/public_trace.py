"""The trace of an experiment that needs arrivals in seconds, by default Mooncake's conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kv_cache.trace import Trace, load
from vcsd_eval.accuracy.data import find

TracePath = Annotated[
    Path | None,
    typer.Option(help="requests: Mooncake's JSON lines or Splitwise's CSV (default: Mooncake's in $VCSD_DATA)"),
]


def public_trace(path: Path | None) -> Trace:
    """Load a trace; raises ValueError if no path is given, or if its arrivals are in steps."""
    path = path or find("mooncake")
    if path is None:
        raise ValueError("--trace is missing: name a trace, or a folder with Mooncake's in VCSD_DATA")
    trace = load(path)
    if trace.unit != "s":
        raise ValueError(f"trace {path}: arrivals must be in seconds: use Mooncake's or Splitwise's format")
    return trace
