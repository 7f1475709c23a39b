"""A stored prefix, attended to in its drives or loaded: which is faster, and from which prefix length on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_spec.presets import INSTCSD_OVERLAPPED
from nvmevirt_config import load_drive
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import numbers
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti.constants import FEW_TOKENS, FLOPS_FEW
from vcsd_eval.papers.tutti.evaluate import TUTTI
from vcsd_eval.papers.tutti.in_drives import LONGEST, Drives, crossover, table_rows
from vcsd_eval.papers.tutti.reading import GpuReading
from vcsd_eval.papers.tutti.reading import Path as Way

GB = 1e9
COLUMNS = {
    "drives": "drives",
    "new": "new tokens",
    "prefix": "stored",
    "load_s": "loaded, ms",
    "load_from_drives_s": "from the drives, ms",
    "in_drives_s": "attended there, ms",
    "bound": "bound",
    "split_s": "both, ms",
    "split_share": "of it there",
    "engine_needed_gmac_per_s": "engine for a tie, GMAC/s",
}


@dataclass(frozen=True, slots=True)
class PrefixQuestion:
    """A question after a stored prefix, without --trace."""

    drive: Annotated[
        Path | None, typer.Option("--drive-config", help="YAML description of the drives (default: InstCSD)")
    ] = None
    drives: Annotated[str, typer.Option(help="comma-separated numbers of drives")] = "8"
    new: Annotated[str, typer.Option(help="comma-separated lengths of a question, tokens")] = "1,16,64,256"
    prefix: Annotated[str, typer.Option(help="comma-separated numbers of stored tokens")] = "8192,32768,131072"
    load_gb_per_s: Annotated[float, typer.Option(min=0.01, max=1000, help="rate at which a prefix is loaded, GB/s")] = (
        TUTTI.bytes_per_s / GB
    )
    tflops: Annotated[float, typer.Option(min=0.1, max=1e5, help="GPU rate in prefill of few tokens, TFLOP/s")] = (
        FLOPS_FEW.value
    )


def reuse(model: Model, gpu: Gpu, question: PrefixQuestion) -> Outcome:
    """Time to the first token with the prefix loaded to the GPU layer by layer, attended to in drives, or both."""
    few = replace(overlay("tutti", FEW_TOKENS), mfu=1.0)
    reading = GpuReading.on(model, replace(gpu, fp16_tflops=question.tflops), few)
    way = Way(question.load_gb_per_s * GB, layered=True)
    news, prefixes = numbers("new", question.new), numbers("prefix", question.prefix)
    spec = load_drive(question.drive) if question.drive else INSTCSD_OVERLAPPED
    kinds = [Drives(spec, count, reading.model.shape) for count in numbers("drives", question.drives)]
    rows = [row for kind in kinds for row in table_rows(kind, reading, way, news, prefixes)]
    ways = {"load": way, "load_from_drives": None}
    least = [
        {"drives": kind.count, "new": count}
        | {name: crossover(kind, reading, count, path or kind.path()) for name, path in ways.items()}
        for kind in kinds
        for count in news
    ]
    return Outcome({"rows": rows, "drives_faster_from": least}, _shown(rows, least))


def _shown(rows: Sequence[dict[str, Any]], least: Sequence[dict[str, Any]]) -> list[Any]:
    """Tables for people: times by question and prefix, and the prefix from which drives are faster."""
    cells = [[_cell(name, row[name]) for name in COLUMNS] for row in rows]
    from_where = [
        [str(each["drives"]), str(each["new"]), *(_tokens(each[name]) for name in ("load", "load_from_drives"))]
        for each in least
    ]
    return [
        table("First token behind a stored prefix (modelled)", list(COLUMNS.values()), cells, left=("bound",)),
        table(
            "Attending in drives is faster from so many stored tokens on",
            ("drives", "new tokens", "than loading", "than loading from the drives"),
            from_where,
            left=("-",),
        ),
    ]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "none would do"
    if name.endswith("per_s"):
        return f"{value:,.0f}"
    if name.endswith("_s"):
        return f"{1e3 * value:,.1f}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _tokens(tokens: int | None) -> str:
    return f"never, to {LONGEST:,}" if tokens is None else f"{tokens:,}"
