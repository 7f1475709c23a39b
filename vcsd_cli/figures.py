"""`vcsd eval throughput|breakdown|engine-breakdown|scaling|sensitivity|claims`: the paper's evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Annotated, Any

import typer
from rich.table import Table

from nvmevirt_config import load_drive
from vcsd_cli.evaluate import evaluate
from vcsd_cli.shared import Output, OutputOption, err, numbers, progress, stdout

__all__ = ["evaluate"]
_BEGAN = time.perf_counter()

ModelOption = Annotated[str, typer.Option(help="model profile: a name or a YAML file")]
GpuOption = Annotated[str, typer.Option(help="GPU profile: a name or a YAML file")]
HostOption = Annotated[str, typer.Option(help="host profile: a name or a YAML file")]
DriveOption = Annotated[Path | None, typer.Option(help="YAML description of the drives (default: the paper's)")]
DrivesOption = Annotated[int, typer.Option(min=1, help="drives that share the KV heads")]
DriveCountsOption = Annotated[str, typer.Option(help="numbers of drives, with commas")]
BatchOption = Annotated[str, typer.Option(help="batch sizes, with commas")]
InputOption = Annotated[int, typer.Option("--input", min=1, help="tokens of a prompt")]
NewOption = Annotated[int, typer.Option("--output-tokens", "--output", min=2, help="new tokens of a sequence")]
CompressionOption = Annotated[float, typer.Option(help="C of SparF's and SparQ's 1/C")]
PlotOption = Annotated[Path | None, typer.Option(help="picture to draw: png, svg or pdf")]
JsonOption = Annotated[Output, typer.Option("-o", help="normal: for people; json: for programs")]


def _number(name: str, text: str) -> int:
    first, *others = numbers(name, text)
    if others:
        raise ValueError(f"{name} = {text!r}: this figure is of one")
    return int(first)


def _setup(model: str, gpu: str, host: str, drive: Path | None, prompt: int, new: int, compression: float) -> Any:
    from csd_spec import Compression
    from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
    from eval.paper.profiles import Gpu, Host, Model, Ssd
    from eval.paper.systems import Setup

    Compression(compression)
    return Setup(
        model=Model.load(model),
        gpu=Gpu.load(gpu),
        host=Host.load(host),
        ssd=Ssd.load("980pro"),
        drive=load_drive(drive) if drive else INSTCSD_ZYNQ7045_8CH,
        input=prompt,
        output=new,
        compression=compression,
    )


def _check_plot(plot: Path | None) -> None:
    if plot:
        from eval.plot import check_format

        check_format(plot)


def _show_rows(title: str, rows: list[dict[str, Any]], columns: Sequence[str], output: Output) -> None:
    if output is Output.JSON:
        used = {"wall_s": time.perf_counter() - _BEGAN, "max_rss_gib": getrusage(RUSAGE_SELF).ru_maxrss / 2**20}
        print(json.dumps({"rows": rows, **used}))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("system", "unit", "reason") else "right")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    stdout().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


@evaluate.command("throughput")
def throughput(
    model: ModelOption = "opt-13b",
    gpu: GpuOption = "a6000",
    host: HostOption = "pcie4",
    drive: DriveOption = None,
    drives: DrivesOption = 1,
    batch_sizes: BatchOption = "4,16,32,64,128,256",
    prompt: InputOption = 1024,
    new: NewOption = 1024,
    compression: CompressionOption = 8,
    plot: PlotOption = None,
    output: JsonOption = Output.NORMAL,
) -> None:
    """Tokens a second of the paper's five systems and of ours (figures 4, 12, 13)."""
    from eval.paper import figures

    _check_plot(plot)
    setup, batches = _setup(model, gpu, host, drive, prompt, new, compression), numbers("batch_sizes", batch_sizes)
    with progress("steps, page by page", 9 * len(batches)) as tick:
        rows = figures.throughput(setup, batches, drives, tick)
    if plot:
        figures.plot_rows(rows, "batch", "tokens_per_s", "system", plot)
    columns = ("system", "batch", "tokens_per_s", "prefill_s", "step_s", "realtime_factor", "reason")
    _show_rows(f"Throughput, {model}, {drives} drives (modelled)", rows, columns, output)


@evaluate.command("breakdown")
def breakdown(
    model: ModelOption = "opt-13b",
    gpu: GpuOption = "a6000",
    host: HostOption = "pcie4",
    drive: DriveOption = None,
    drives: DrivesOption = 1,
    batch_sizes: BatchOption = "4,64,256",
    prompt: InputOption = 1024,
    new: NewOption = 1024,
    compression: CompressionOption = 8,
    plot: PlotOption = None,
    output: JsonOption = Output.NORMAL,
) -> None:
    """What a decode step's time goes to (figures 5, 14, 15)."""
    from eval.paper import figures

    _check_plot(plot)
    setup, batches = _setup(model, gpu, host, drive, prompt, new, compression), numbers("batch_sizes", batch_sizes)
    with progress("steps, page by page", 9 * len(batches)) as tick:
        rows = figures.breakdown(setup, batches, drives, tick)
    if plot:
        figures.plot_stack(rows, "system", ("kv_share", "engine_share", "other_share"), plot)
    columns = ("system", "batch", "step_s", "kv_share", "engine_share", "other_share", "hidden_s", "reason")
    _show_rows(f"Decode step, {model}, {drives} drives (modelled)", rows, columns, output)


@evaluate.command("engine-breakdown")
def engine_breakdown(
    model: ModelOption = "opt-13b",
    gpu: GpuOption = "a6000",
    host: HostOption = "pcie4",
    drive: DriveOption = None,
    drives: DrivesOption = 1,
    batch_sizes: BatchOption = "64",
    prompt: InputOption = 1024,
    new: NewOption = 1024,
    compression: CompressionOption = 8,
    plot: PlotOption = None,
    output: JsonOption = Output.NORMAL,
) -> None:
    """Seconds of each unit of a drive in the middle decode step (figure 16)."""
    from eval.paper import figures

    _check_plot(plot)
    setup, batch = _setup(model, gpu, host, drive, prompt, new, compression), _number("batch_sizes", batch_sizes)
    with progress("steps, page by page", 9) as tick:
        rows = figures.engine_breakdown(setup, batch, drives, tick)
    if plot:
        figures.plot_rows(rows, "unit", "s", "system", plot)
    _show_rows(f"A drive's units, batch {batch} (modelled)", rows, ("system", "unit", "s", "share"), output)


@evaluate.command("scaling")
def scaling(
    model: ModelOption = "opt-13b",
    gpu: GpuOption = "a6000",
    host: HostOption = "pcie4",
    drive: DriveOption = None,
    drives: DriveCountsOption = "1,2,4,8,20",
    batch_sizes: BatchOption = "256",
    prompt: InputOption = 1024,
    new: NewOption = 1024,
    compression: CompressionOption = 8,
    plot: PlotOption = None,
    output: JsonOption = Output.NORMAL,
) -> None:
    """Throughput over the number of drives (figure 17a)."""
    from eval.paper import figures

    _check_plot(plot)
    setup, counts = _setup(model, gpu, host, drive, prompt, new, compression), numbers("drives", drives)
    batch = _number("batch_sizes", batch_sizes)
    with progress("steps, page by page", 12 * len(counts)) as tick:
        rows = figures.scaling(setup, batch, counts, tick)
    if plot:
        figures.plot_rows(rows, "drives", "speedup", "system", plot)
    columns = ("system", "drives", "tokens_per_s", "speedup", "step_s", "kv_s", "other_s", "reason")
    _show_rows(f"Scaling, {model}, batch {batch} (modelled)", rows, columns, output)


@evaluate.command("sensitivity")
def sensitivity(
    model: ModelOption = "opt-13b",
    gpu: GpuOption = "a6000",
    host: HostOption = "pcie4",
    drive: DriveOption = None,
    drives: DrivesOption = 1,
    batch_sizes: BatchOption = "256",
    prompt: InputOption = 1024,
    new: NewOption = 1024,
    compression: Annotated[str, typer.Option(help="C of 1/C, with commas")] = "1,2,4,8,16,32",
    plot: PlotOption = None,
    output: JsonOption = Output.NORMAL,
) -> None:
    """SparF over its compression (figure 17b); pages touched as recorded, scaled to the paper's at 1/8."""
    from eval.paper import figures

    _check_plot(plot)
    compressions = numbers("compression", compression, float)
    setup, batch = _setup(model, gpu, host, drive, prompt, new, 8), _number("batch_sizes", batch_sizes)
    with err.status("recording attention"):
        scaled = figures.scaled_shares(setup, compressions)
    with progress("steps, page by page", 3 * len(compressions)) as tick:
        rows = figures.sensitivity(setup, batch, drives, compressions, scaled, tick)
    if plot:
        figures.plot_rows(rows, "compression", "tokens_per_s", "drives", plot)
    columns = ("compression", "token_page_share", "tokens_per_s", "step_s", "reason")
    _show_rows(f"SparF, {model}, batch {batch}, {drives} drives (modelled)", rows, columns, output)


@evaluate.command("claims")
def claims(
    model: ModelOption = "opt-13b",
    gpu: GpuOption = "a6000",
    host: HostOption = "pcie4",
    output: OutputOption = Output.NORMAL,
) -> None:
    """The paper's printed figures beside ours: calibrated, predicted, held out."""
    from eval.paper.claims import PLACES, evaluate_claims
    from eval.paper.figures import recorded_shares

    setup = _setup(model, gpu, host, None, 1024, 1024, 8)
    with err.status("recording attention"):
        share = recorded_shares(setup, [8.0])[8.0]
    with progress("steps, page by page", 15 * len(PLACES) + 12) as tick:
        result = evaluate_claims(setup, share, tick)
    if output is Output.JSON:
        print(json.dumps(result))
        return
    columns = ("id", "text", "paper", "ours", "kind", "error %", "overlapped", "held out")
    table = Table(title="Claims of InstInfer (modelled)", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("id", "text", "kind") else "right")
    for row in result["rows"]:
        figures = (row["ours_overlapped"], row["held_out"])
        error = f"{row['error_percent']:+.1f}"
        cells = (_cell(float(row["paper"])), _cell(row["ours"]), row["kind"], error, *map(_cell, figures))
        table.add_row(row["id"], row["text"], *cells)
    stdout().print(table)
    fixed = Table(title="Calibrated", title_justify="left")
    for column in ("name", "value", "unit", "fixed by", "why"):
        fixed.add_column(column)
    for each in result["calibrated"]:
        fixed.add_row(each["name"], f"{each['value']:g}", each["unit"], each["fixed_by"], each["why"])
    stdout().print(fixed)
    for each in result["exceptions"]:
        stdout().print(f"exception {each['id']}: {each['reason']}")
    median, worst = result["median_error_percent"], result["worst_error_percent"]
    stdout().print(f"predicted rows: median error {median:.1f} %, worst {worst:.1f} %")
    ours = {name: value for name, value in result["ours"].items() if isinstance(value, float)}
    stdout().print("ours: " + ", ".join(f"{name} {value:.2f}" for name, value in ours.items()))


def report(
    out: Annotated[Path, typer.Option(help="folder for index.html")] = Path("report"),
    model: ModelOption = "opt-13b",
    gpu: GpuOption = "a6000",
    host: HostOption = "pcie4",
) -> None:
    """The claims and the figures of one drive, scaling and sensitivity, as one page that needs no network."""
    from eval.paper.report import STEPS, write_report

    with progress("steps, page by page", STEPS) as tick:
        page = write_report(_setup(model, gpu, host, None, 1024, 1024, 8), out, tick)
    err.print(f"{page}: {page.stat().st_size / 1e6:.1f} MB")
