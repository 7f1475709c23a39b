"""`vcsd run`: continue a text with attention in drives."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from csd_link.driveset import DriveSet
from csd_spec import Budget, Compression, Fixed, SparFParams
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_drive
from vcsd.options import MethodsFile, ModelFolder
from vcsd.progress import progress, status
from vcsd.transport import TRANSPORT_HELP, check_method, methods_of
from vcsd_cli.shared import ATTENTION_HELP, Output, OutputOption, stdout


class Processor(StrEnum):
    """Where the model runs."""

    CPU = "cpu"
    CUDA = "cuda"


class Bits(StrEnum):
    """Of the values of the embedding-indexed copy of K."""

    FP16 = "16"
    INT8 = "8"
    INT4 = "4"


class ConventionName(StrEnum):
    """What a compression counts."""

    PAPER = "paper"
    BYTES = "bytes"


def run(
    prompt: Annotated[str | None, typer.Option(help="text to continue (default: a text about drives)")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with the text to continue")] = None,
    model: ModelFolder = None,
    drives: Annotated[int, typer.Option(help="virtual drives that share the KV heads")] = 2,
    attention: Annotated[str, typer.Option(help=ATTENTION_HELP)] = "sparf",
    compression: Annotated[float | None, typer.Option(help="use 1/C of K and V (default: 8; 1 is dense)")] = None,
    convention: Annotated[ConventionName, typer.Option(help="paper: k = S/C; bytes: k = S/2C")] = ConventionName.PAPER,
    r: Annotated[int | None, typer.Option("--r", help="channels of q and K, instead of --compression")] = None,
    k: Annotated[int | None, typer.Option("--k", help="tokens, instead of --compression")] = None,
    recent: Annotated[int | None, typer.Option("--l", help="most recent tokens among them (default: k / 4)")] = None,
    embedding_bits: Annotated[Bits, typer.Option(help="of the values of K's embedding-indexed copy")] = Bits.FP16,
    max_new_tokens: Annotated[int, typer.Option(help="length of the continuation")] = 128,
    batch: Annotated[int, typer.Option(help="rows; those after the first begin inside the prompt")] = 1,
    seed: Annotated[int, typer.Option(help="of the places where those rows begin")] = 0,
    drive: Annotated[Path | None, typer.Option(help="YAML description of the drives (default: the paper's)")] = None,
    keep: Annotated[Path | None, typer.Option(help="folder to keep the drives in, for vcsd log")] = None,
    transport: Annotated[str, typer.Option(help=TRANSPORT_HELP)] = "inproc",
    flush_every: Annotated[int, typer.Option(min=0, help="flush drives after so many steps; 0: never")] = 0,
    restart: Annotated[bool, typer.Option(help="begin a drive again that dies, where it has its own process")] = True,
    device: Annotated[Processor, typer.Option(help="where the model runs")] = Processor.CPU,
    methods: MethodsFile = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Continue a text with attention in drives, and compare with ordinary attention."""
    spec = load_drive(drive) if drive else INSTCSD_ZYNQ7045_8CH
    wanted = DriveSet(count=drives, spec=spec, transport=transport, keep=keep, restart=restart, methods=methods)
    check_method(attention, methods_of(wanted))
    budget = _budget(attention, compression, convention, r, k, recent)
    text = _prompt(prompt, prompt_file)
    with status("loading the model"):
        from host_driver.hf.shape import model_shape
        from host_driver.sharding import split_heads
        from vcsd.generate import CHECKPOINT, decode, encode, load

        path = model or CHECKPOINT
        loaded, tokenizer = load(path, device)
        shape = model_shape(loaded)
        split_heads(shape.kv_heads, drives)
        budget.at(1, shape.head_dim)
        inputs = encode(loaded, tokenizer, text, batch, max_new_tokens, seed)
    normal = output is Output.NORMAL
    stream = _TextStream(tokenizer, inputs["input_ids"][0].tolist()) if normal else None
    if normal:
        print(text, end="", flush=True)
    with progress("ordinary attention", max_new_tokens) as tick:
        done = decode(
            loaded,
            inputs,
            max_new_tokens,
            drives,
            attention,
            budget,
            tokenizer,
            stream,
            tick,
            spec,
            keep,
            int(embedding_bits),
            transport,
            flush_every,
            restart,
            methods,
        )
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
    stdout().print(table, done.report)


def _budget(
    attention: str,
    compression: float | None,
    convention: ConventionName,
    r: int | None,
    k: int | None,
    recent: int | None,
) -> Budget:
    """What the options ask for; dense attention uses everything."""
    outright = [value is not None for value in (r, k, recent)]
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

    source = prompt_file or files("vcsd") / "shipped" / "prompt.txt"
    try:
        return source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error


class _TextStream:
    """Prints row 0's text as its tokens come; waits where a character is not whole yet."""

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self.tokenizer, self.prompt, self.shown = tokenizer, prompt, 0
        self.ids: list[int] = []

    def __call__(self, tokens: Any) -> None:
        from vcsd.generate import continuation

        self.ids.append(int(tokens[0]))
        text = continuation(self.tokenizer, self.prompt, self.ids)
        if not text.endswith("\ufffd"):
            print(text[self.shown :], end="", flush=True)
            self.shown = len(text)
