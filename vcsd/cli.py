"""The command line. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from csd_spec import Budget, Compression, DeviceError, Fixed, SparFParams
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_drive

app = typer.Typer(
    help="Virtual computational storage drives for in-storage attention.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench = typer.Typer(help="Measure the emulator itself, beside its rivals.")
app.add_typer(bench, name="bench")
log = typer.Typer(help="Log pages of a drive that was kept in a folder.")
app.add_typer(log, name="log")
trace = typer.Typer(help="Block traces in MQSim's text format.")
app.add_typer(trace, name="trace")
err = Console(stderr=True)
ATTENTION_HELP = "how drives attend: dense, sparf, or another method of attention_engine (see docs/methods.md)"


class Output(StrEnum):
    """How a result is printed."""

    NORMAL = "normal"
    JSON = "json"


class Processor(StrEnum):
    """Where the model runs."""

    CPU = "cpu"
    CUDA = "cuda"


class ConventionName(StrEnum):
    """What a compression counts."""

    PAPER = "paper"
    BYTES = "bytes"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="normal: for people; json: for programs")]


@app.callback()
def root() -> None:
    """Virtual computational storage drives for in-storage attention."""


@app.command()
def run(
    prompt: Annotated[str | None, typer.Option(help="text to continue (default: a text about drives)")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with the text to continue")] = None,
    model: Annotated[Path | None, typer.Option(help="folder of a decoder (default: the shipped one)")] = None,
    drives: Annotated[int, typer.Option(help="virtual drives that share the KV heads")] = 2,
    attention: Annotated[str, typer.Option(help=ATTENTION_HELP)] = "sparf",
    compression: Annotated[float | None, typer.Option(help="use 1/C of K and V (default: 8; 1 is dense)")] = None,
    convention: Annotated[ConventionName, typer.Option(help="paper: k = S/C; bytes: k = S/2C")] = ConventionName.PAPER,
    r: Annotated[int | None, typer.Option("--r", help="channels of q and K, instead of --compression")] = None,
    k: Annotated[int | None, typer.Option("--k", help="tokens, instead of --compression")] = None,
    recent: Annotated[int | None, typer.Option("--l", help="most recent tokens among them (default: k / 4)")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="length of the continuation")] = 128,
    batch: Annotated[int, typer.Option(help="rows; those after the first begin inside the prompt")] = 1,
    seed: Annotated[int, typer.Option(help="of the places where those rows begin")] = 0,
    drive: Annotated[Path | None, typer.Option(help="YAML description of the drives (default: the paper's)")] = None,
    keep: Annotated[Path | None, typer.Option(help="folder to keep the drives in, for vcsd log")] = None,
    device: Annotated[Processor, typer.Option(help="where the model runs")] = Processor.CPU,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Continue a text with attention in drives, and compare with ordinary attention."""
    budget = _budget(attention, compression, convention, r, k, recent)
    text = _prompt(prompt, prompt_file)
    spec = load_drive(drive) if drive else INSTCSD_ZYNQ7045_8CH
    with err.status("loading the model"):
        from eval.decode import CHECKPOINT, decode, encode, load
        from host_driver.hf import model_shape
        from host_driver.sharding import split_heads

        path = model or CHECKPOINT
        loaded, tokenizer = load(path, device)
        shape = model_shape(loaded)
        split_heads(shape.kv_heads, drives)
        budget.at(1, shape.head_dim)
        inputs = encode(loaded, tokenizer, text, batch, max_new_tokens, seed)
    normal = output is Output.NORMAL
    stream = _TextStream(tokenizer) if normal else None
    if normal:
        print(text, end="", flush=True)
    with _progress("ordinary attention", max_new_tokens) as tick:
        done = decode(loaded, inputs, max_new_tokens, drives, attention, budget, tokenizer, stream, tick, spec, keep)
    params = done.last_params
    if output is Output.JSON:
        result = {
            "model": {
                "name": path.name,
                "layers": shape.layers,
                "q_heads": shape.q_heads,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
            },
            "attention": attention,
            "convention": convention,
            "r": params.r,
            "k": params.k,
            "l": params.l,
            "text": done.text,
            "tokens": done.tokens,
            "agreement": {
                "tokens_equal": done.agreement.tokens_equal,
                "max_abs_logit_diff": done.agreement.max_abs_logit_diff,
                "top1_rate": done.agreement.top1_rate,
            },
            **done.report.to_dict(),
            "wall_s": done.wall_s,
        }
        print(json.dumps(result))
        return
    print("\n")
    table = Table(title=f"Agreement with ordinary attention ({attention})", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row("r, k, l at the last step", f"{params.r}, {params.k}, {params.l}")
    table.add_row("greedy tokens equal", "yes" if done.agreement.tokens_equal else "no")
    table.add_row("same best token, on the reference's text", f"{done.agreement.top1_rate:.1%}")
    table.add_row("largest logit difference", f"{done.agreement.max_abs_logit_diff:.4f}")
    table.add_row("emulator wall time, s", f"{done.wall_s:.1f}")
    Console().print(table, done.report)


@bench.command("decode")
def bench_decode_command(
    tokens: Annotated[int, typer.Option(min=1, help="prompt length")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="decode steps a run")] = 16,
    drives: Annotated[int, typer.Option(help="virtual drives")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="runs that count")] = 5,
    model: Annotated[Path | None, typer.Option(help="folder of a decoder (default: the shipped one)")] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Wall time of a decode step: ordinary attention against emulated drives."""
    from eval.bench import ATTENTIONS, bench_decode
    from eval.decode import CHECKPOINT, load

    loaded, _ = load(model or CHECKPOINT)
    if tokens + steps > loaded.config.max_position_embeddings:
        raise ValueError(f"tokens = {tokens}: the model's context is {loaded.config.max_position_embeddings}")
    with _progress("runs", (repeats + 1) * len(ATTENTIONS)) as tick:
        result = bench_decode(loaded, tokens, steps, drives, batch, repeats, tick)
    if output is Output.JSON:
        print(json.dumps(result))
        return
    table = Table(title=f"Decode step, {batch} x {tokens} tokens, {drives} drives (wall time)", title_justify="left")
    table.add_column("attention")
    table.add_column("ms", justify="right")
    table.add_column("of sdpa's", justify="right")
    for name, ms in result["step_ms"].items():
        table.add_row(name, f"{ms:.1f}", f"{result['wall_over_sdpa'][name]:.2f}x")
    Console().print(table)


class Kernel(StrEnum):
    """What `vcsd bench attention` times."""

    DENSE = "dense"
    SPARF = "sparf"


@bench.command("attention")
def bench_attention_command(
    tokens: Annotated[int, typer.Option(min=16, max=1 << 18, help="length of the sequence")] = 32768,
    heads: Annotated[int, typer.Option(min=1, max=256, help="query heads")] = 40,
    head_dim: Annotated[int, typer.Option(min=8, max=256, help="channels of a head")] = 128,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads (default: as many as query heads)")] = None,
    method: Annotated[Kernel, typer.Option(help="dense, or SparF with r = 16, k = S/8")] = Kernel.DENSE,
    threads: Annotated[int, typer.Option(min=1, max=64, help="of the kernel and of its rivals")] = 1,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Wall time of the attention kernels beside PyTorch's, and the share of the memory's bandwidth that they reach."""
    from eval.bench_attention import ROUNDS, bench_attention

    with _progress("turns", 5 * (ROUNDS + 1)) as tick:
        result = bench_attention(tokens, heads, head_dim, kv_heads or heads, method, threads, tick=tick)
    _show("attention", result, output)


class Workload(StrEnum):
    """What `vcsd bench ftl` puts on a drive."""

    RANDREAD = "randread"
    ATTENTION = "attention"
    CHURN = "churn"


@bench.command("ftl")
def bench_ftl_command(
    workload: Annotated[Workload, typer.Option(help="load on the drive")] = Workload.ATTENTION,
    preset: Annotated[str, typer.Option(help="randread: which conventional SSD")] = "nvmevirt-970pro",
    block_bytes: Annotated[int, typer.Option(help="randread: size of a request")] = 4096,
    qd: Annotated[int, typer.Option(min=1, max=65536, help="randread: requests under way")] = 16,
    read_percent: Annotated[int, typer.Option(min=0, max=100, help="randread: share of reads")] = 100,
    requests: Annotated[int, typer.Option(min=1, help="randread: requests; attention: layers read")] = 1_000_000,
    capacity_gb: Annotated[int, typer.Option(min=1, help="attention: capacity of the drive, 10^9 bytes")] = 64,
    fill: Annotated[float, typer.Option(min=0.01, max=0.9, help="attention: share that is filled first")] = 0.5,
    heads: Annotated[int, typer.Option(min=1, max=128, help="attention: KV heads")] = 40,
    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="attention: tokens of a sequence")] = 1536,
    compression: Annotated[int, typer.Option(min=1, max=64, help="attention: SparF at 1/C")] = 8,
    trace: Annotated[Path | None, typer.Option(help="churn: CSV with lengths of requests")] = None,
    full: Annotated[float, typer.Option(min=0.1, max=0.85, help="churn: share of the drive in use")] = 0.8,
    erase_mean: Annotated[float, typer.Option(min=0.1, help="churn: run until blocks are worn this much")] = 50.0,
    seed: Annotated[int, typer.Option(help="of all that is random")] = 0,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Flash under load: modelled times, wear, and how fast the emulator is."""
    from csd_spec.presets import BLOCK_SSDS
    from eval.bench_ftl import bench_attention, bench_churn, bench_randread

    if workload is Workload.RANDREAD:
        if preset not in BLOCK_SSDS:
            raise ValueError(f"preset = {preset!r}: must be one of {', '.join(BLOCK_SSDS)}")
        with err.status("requests"):
            result = bench_randread(BLOCK_SSDS[preset], block_bytes, qd, read_percent, requests, seed)
    elif workload is Workload.ATTENTION:
        with err.status("filling the drive, then reading"):
            count = min(requests, 2000)
            result = bench_attention(capacity_gb * 10**9, fill, heads, tokens, count, compression)
    else:
        with _progress("mean erase count", int(erase_mean)) as tick:
            result = bench_churn(trace, full, erase_mean, seed, tick)
    _show(f"ftl, {workload}", result, output)


@bench.command("crash")
def bench_crash_command(
    cuts: Annotated[int, typer.Option(min=2, help="cut points at the least")] = 10_000,
    seed: Annotated[int, typer.Option(help="of the trace")] = 0,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Cut the power at every moment of a trace of all verbs, and at random in longer ones; then compare every byte."""
    from eval.bench_crash import bench_crash

    with _progress("power cuts", cuts + cuts // 10) as tick:
        result = bench_crash(cuts, seed, tick)
    _show("power cuts", result, output)
    if result["lost"] or result["wrong"]:
        sys.exit(1)


DriveArgument = Annotated[Path, typer.Argument(help="folder of the drive (see vcsd run --keep)")]


@log.command("smart")
def log_smart(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Health: wear, spare blocks, data written, media errors."""
    from csd_firmware import InProcessDevice
    from csd_firmware.logs import smart

    _show(f"SMART, {drive}", smart(InProcessDevice.reopen(drive, private=True).firmware.ftl), output)


@log.command("wear")
def log_wear(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Write amplification, erase histogram, bad blocks."""
    from csd_firmware import InProcessDevice
    from csd_firmware.logs import wear

    _show(f"wear, {drive}", wear(InProcessDevice.reopen(drive, private=True).firmware.ftl), output)


@app.command("snapshot")
def snapshot(drive: DriveArgument, folder: Annotated[Path, typer.Argument(help="new folder for the snapshot")]) -> None:
    """Copy a drive's data and map, as its last flush left them."""
    _copy_drive(drive, folder)


@app.command("restore")
def restore(
    snapshot: Annotated[Path, typer.Argument(help="folder of a snapshot")],
    drive: Annotated[Path, typer.Argument(help="new folder for the drive")],
) -> None:
    """Make a drive in the state of a snapshot, which stays as it is."""
    _copy_drive(snapshot, drive)


def _copy_drive(source: Path, target: Path) -> None:
    from csd_firmware import InProcessDevice

    with err.status(f"copying {source} to {target}"):
        device = InProcessDevice.reopen(source, private=True)
        device.snapshot(target)
    err.print(f"{target}: {len(device.firmware.ftl.sequences)} sequences")


@trace.command("replay")
def trace_replay(
    file: Annotated[Path, typer.Argument(help="trace: time_ns device lba sectors op on each line")],
    preset: Annotated[str, typer.Option(help="which conventional SSD")] = "nvmevirt-970pro",
    output: OutputOption = Output.NORMAL,
) -> None:
    """Modelled latencies of a trace on a conventional SSD."""
    from csd_spec.presets import BLOCK_SSDS
    from eval.block_trace import load_trace, replay

    if preset not in BLOCK_SSDS:
        raise ValueError(f"preset = {preset!r}: must be one of {', '.join(BLOCK_SSDS)}")
    _show(f"replay, {file.name}", replay(load_trace(file), BLOCK_SSDS[preset]), output)


@trace.command("record")
def trace_record(
    file: Annotated[Path, typer.Argument(help="file to write")],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 16, help="prompt length")] = 1024,
    steps: Annotated[int, typer.Option(min=0, max=4096, help="decode steps")] = 16,
    attention: Annotated[str, typer.Option(help=ATTENTION_HELP)] = "sparf",
    compression: Annotated[float, typer.Option(help="use 1/C of K and V")] = 8,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Write down what a drive's flash is asked for while a sequence decodes."""
    from eval.block_trace import record

    with err.status("decoding"):
        result = record(file, tokens, steps, attention, compression)
    _show("record", result, output)


def _show(title: str, result: dict[str, Any], output: Output) -> None:
    """A flat result as a table or as json."""
    if output is Output.JSON:
        print(json.dumps(result))
        return
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in result.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _budget(
    attention: str,
    compression: float | None,
    convention: ConventionName,
    r: int | None,
    k: int | None,
    recent: int | None,
) -> Budget:
    """What the options ask for; dense attention uses everything."""
    from attention_engine import METHODS

    outright = [value is not None for value in (r, k, recent)]
    if attention not in METHODS:
        raise ValueError(f"attention = {attention!r}: must be one of {', '.join(METHODS)}")
    if any(outright) and compression is not None:
        raise ValueError("--compression and --r, --k, --l exclude each other")
    if attention == "dense":
        return Compression(1)
    if not any(outright):
        return Compression(8 if compression is None else compression, convention.value)
    if r is None or k is None:
        raise ValueError("--r and --k are needed together")
    return Fixed(SparFParams(r, k, -(-k // 4) if recent is None else recent))


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ValueError("--prompt and --prompt-file exclude each other")
    if prompt is not None:
        return prompt
    from importlib.resources import files

    source = prompt_file or files("eval") / "prompt.txt"
    try:
        return source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error


class _TextStream:
    """Prints row 0's text as its tokens come; waits where a character is not whole yet."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.shown = tokenizer, 0
        self.ids: list[int] = []

    def __call__(self, tokens: Any) -> None:
        self.ids.append(int(tokens[0]))
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            print(text[self.shown :], end="", flush=True)
            self.shown = len(text)


class _progress:  # noqa: N801 - used as a function
    """A progress bar on stderr that appears with the first tick; nothing when that is no terminal."""

    def __init__(self, what: str, total: int) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.task = self.bar.add_task(what, total=total)

    def __enter__(self) -> Any:
        return self._tick

    def _tick(self, _: Any) -> None:
        if not self.bar.live.is_started:
            if sys.stdout.isatty():
                print(flush=True)
            self.bar.start()
        self.bar.advance(self.task)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def main() -> None:
    """Run a command; an error is one line on stderr and a non-zero exit."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        print(f"vcsd: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("vcsd: interrupted", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, DeviceError) as error:
        print(f"vcsd: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code or 0)
