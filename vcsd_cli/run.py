"""`vcsd run`: continue a text with attention in drives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from csd_link.driveset import DriveSet
from csd_link.hosted import Hosted
from csd_spec import Attention, Budget, Compression, DriveSpec, Fixed, SparFParams
from csd_spec.attention import Storage
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.sparf import Convention
from nvmevirt_config import load_drive
from vcsd.options import MAX_COMPRESSION, MAX_SEED, Hosting, LayoutOption, MethodsFile, ModelFolder
from vcsd.progress import progress, status
from vcsd.tables import table
from vcsd.transport import TRANSPORT_HELP, check_method, methods_of
from vcsd_cli.shared import ATTENTION_HELP, Output, OutputOption, importing, print_json, stdout
from vcsd_cli.tiers import InTiers

if TYPE_CHECKING:
    from vcsd.attached import Setting
    from vcsd.generate import Attachable


NOTHING_MOVES: dict[str, Any] = {"places": [], "paths": []}  # but q, k, v and the output: `link_bytes`

HOST_MEMORY_MIB = 512  # of all drives of a run, where nothing is said


class Processor(StrEnum):
    """Where the model runs."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Text:
    """What is continued, by how much, and whether it is compared."""

    prompt: Annotated[str | None, typer.Option(help="text to continue (default: a text about drives)")] = None
    prompt_file: Annotated[Path | None, typer.Option(help="file with the text to continue")] = None
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="length of the continuation")] = 128
    batch: Annotated[int, typer.Option(min=1, max=1024, help="rows; those after the first begin inside the prompt")] = 1
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the places where those rows begin")] = 0
    compare: Annotated[bool, typer.Option(help="compare with ordinary attention, all in memory")] = True

    def read(self) -> str:
        """The text."""
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("--prompt and --prompt-file exclude each other")
        if self.prompt is not None:
            return self.prompt
        source = self.prompt_file or files("vcsd") / "shipped" / "prompt.txt"
        try:
            return source.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error


@dataclass(frozen=True, slots=True)
class What:
    """What attends."""

    attention: Annotated[str | None, typer.Option(help=ATTENTION_HELP)] = None
    compression: Annotated[
        float | None, typer.Option(min=1, max=MAX_COMPRESSION, help="use 1/C of K and V (default: 8; 1 is dense)")
    ] = None
    convention: Annotated[Convention | None, typer.Option(help="paper: k = S/C (the default); bytes: k = S/2C")] = None
    r: Annotated[
        int | None, typer.Option("--r", min=1, max=1 << 20, help="channels of q and K, instead of --compression")
    ] = None
    k: Annotated[int | None, typer.Option("--k", min=1, max=1 << 20, help="tokens, instead of --compression")] = None
    recent: Annotated[
        int | None, typer.Option("--l", min=0, max=1 << 20, help="most recent tokens among them (default: k / 4)")
    ] = None
    layout: LayoutOption = None
    storage: Annotated[
        Storage | None, typer.Option(help="of K and V, fp8 in layout 16 (default: as the model computes, else fp16)")
    ] = None

    def given(self) -> str:
        """The first option that was given; empty without one."""
        names = (each.name for each in fields(self) if getattr(self, each.name) is not None)
        return next((f"--{'l' if name == 'recent' else name}" for name in names), "")

    def value(self, default: str) -> Attention:
        """The options as one value; default: what attends where nothing is said."""
        method = self.attention or default
        asked = self.compression, self.convention, self._budget(method), self.layout, self.storage
        return Attention.named(method, *asked)

    def _budget(self, method: str) -> Budget | None:
        """What the options ask for outright; dense attention uses everything."""
        outright = [value is not None for value in (self.r, self.k, self.recent)]
        if any(outright) and self.compression is not None:
            raise ValueError("--compression and --r, --k, --l exclude each other")
        if method == "dense":
            return Compression(1)
        if not any(outright):
            return None
        if self.r is None or self.k is None:
            raise ValueError("--r and --k are needed together")
        return Fixed(SparFParams(self.r, self.k, -(-self.k // 4) if self.recent is None else self.recent))


@dataclass(frozen=True, slots=True)
class Where:
    """What it runs on."""

    drives: Annotated[int, typer.Option(min=1, max=1024, help="virtual drives that share the heads")] = 2
    drive: Annotated[Path | None, typer.Option(help="YAML description of the drives (default: the paper's)")] = None
    keep: Annotated[Path | None, typer.Option(help="folder to keep the drives in, for vcsd log")] = None
    transport: Annotated[str, typer.Option(help=TRANSPORT_HELP)] = "inproc"
    restart: Annotated[bool, typer.Option(help="restart a drive that dies, where it has its own process")] = True
    methods: MethodsFile = None
    flush_every: Annotated[int, typer.Option(min=0, max=1 << 20, help="flush drives after so many steps; 0: never")] = 0

    def value(self, hosting: Hosting) -> DriveSet:
        """The options as one value."""
        hosting = replace(hosting, host_memory_mib=hosting.host_memory_mib or HOST_MEMORY_MIB)
        spec: DriveSpec = load_drive(self.drive) if self.drive else INSTCSD_ZYNQ7045_8CH
        return DriveSet(
            count=self.drives,
            spec=spec,
            transport=self.transport,
            keep=self.keep,
            restart=self.restart,
            methods=self.methods,
            **hosting.over(Hosted(), self.drives),
        )


def run(
    text: Text,
    what: What,
    where: Where,
    hosting: Hosting,
    tiers: InTiers,
    model: ModelFolder = None,
    device: Annotated[Processor, typer.Option(help="where the model runs")] = Processor.CPU,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Continue a text with K and V in drives, or in tiers, and compare with ordinary attention."""
    prompt = text.read()
    in_tiers = tiers.value()
    if in_tiers and (option := what.given()):
        raise ValueError(f"{option} is of drives, and with --residency {tiers.residency} the model attends itself")
    with status("loading the model"):
        with importing():
            from host_driver.hf.shape import placement
            from vcsd.generate import Continuation, compare, continue_text
            from vcsd.loading import CHECKPOINT, encode, load
            from vcsd.room import check_cache

        setting: Attachable = in_tiers or _in_drives(what, where.value(hosting), where.flush_every, tiers)
        path = model or CHECKPOINT
        loaded, tokenizer = load(path, device)
        shape = placement(loaded).shape
        setting = setting.stored(loaded.dtype, shape.latent)
        setting.check(shape)
        inputs = encode(loaded, tokenizer, prompt, text.batch, text.max_new_tokens, text.seed)
        rows, longest = inputs["input_ids"].shape[0], inputs["input_ids"].shape[1] + text.max_new_tokens
        setting = setting.sized(shape, rows, longest)
        if text.compare and device is Processor.CPU:
            check_cache(shape, loaded.dtype.itemsize, rows, longest)
    normal = output is Output.NORMAL
    stream = _TextStream(tokenizer, inputs["input_ids"][0].tolist()) if normal else None
    if normal:
        print(prompt, end="", flush=True)
    given = loaded, tokenizer, inputs, text.max_new_tokens, setting, stream
    if text.compare:
        with progress("ordinary attention", text.max_new_tokens) as tick:
            done: Continuation = compare(*given, tick)
    else:
        done = continue_text(*given)
    asked = setting.asked(done.stored, shape.head_dim)
    if tiers.residency and not in_tiers:
        asked["residency"] = {"policy": tiers.residency, "why": "", "turns": done.report.steps + 1} | NOTHING_MOVES
    if normal:
        _show(done, asked)
    else:
        figures = {key: value for key, value in asdict(shape).items() if key != "name"}
        print_json({"model": {"name": path.name, **figures}, **asked, **_figures(done)})


def _in_drives(what: What, drives: DriveSet, flush_every: int, tiers: InTiers) -> Setting:
    """The setting of a run in drives; one that is asked for as a residency attends to everything."""
    from vcsd.attached import Setting

    attention = what.value("dense" if tiers.residency else "sparf")
    check_method(attention, methods_of(drives))
    return Setting(attention=attention, drives=drives, flush_every=flush_every)


def _figures(done: Any) -> dict[str, Any]:
    """A comparison for programs."""
    return {
        "text": done.text,
        "tokens": done.tokens,
        "agreement": asdict(done.agreement) if hasattr(done, "agreement") else None,
        **done.report.to_dict(),
        "wall_s": done.wall_s,
    }


def _show(done: Any, asked: dict[str, Any]) -> None:
    """A comparison for people, behind the text that was streamed."""
    selected = [str(asked[name]) for name in ("r", "k", "l") if name in asked]
    agreement = getattr(done, "agreement", None)
    compared = (
        (
            ("greedy tokens equal", "yes" if agreement.tokens_equal else "no"),
            ("same best token, on the reference's text", f"{agreement.top1_rate:.1%}"),
            ("largest logit difference", f"{agreement.max_abs_logit_diff:.4f}"),
        )
        if agreement
        else ()
    )
    rows = (
        *([("r, k, l at the last step", ", ".join(selected))] if selected else []),
        *([("layout", f"{asked['layout']}, lossy, {asked['lossy']}")] if asked.get("lossy") else []),
        *compared,
        ("emulator wall time, s", f"{done.wall_s:.1f}"),
    )
    print("\n")
    title = "Agreement with ordinary attention" if agreement else "Not compared with ordinary attention"
    shown = table(f"{title} ({asked['attention']})", ("what", "figure"), rows)
    stdout().print(shown, done.report)


class _TextStream:
    """Prints row 0's text as its tokens come; waits where a character is not whole yet."""

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self.tokenizer, self.prompt, self.shown = tokenizer, prompt, 0
        self.ids: list[int] = []

    def __call__(self, tokens: Any) -> None:
        from vcsd.loading import continuation

        self.ids.append(int(tokens[0]))
        text = continuation(self.tokenizer, self.prompt, self.ids)
        if not text.endswith("\ufffd"):
            print(text[self.shown :], end="", flush=True)
            self.shown = len(text)
