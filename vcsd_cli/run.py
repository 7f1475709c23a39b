"""`vcsd run`: generate text with the KV cache in drives or in tiers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from csd_link.driveset import DriveOptions, DriveSetConfig
from csd_link.fleet_table import MAX_DRIVES
from csd_spec import AttentionConfig, CompressionBudget, FixedBudget, SparFParams
from csd_spec.checked import frozen_part, frozen_value
from host_driver.first_steps import FirstSteps
from kv_cache.policies import POLICIES, moves_blocks
from nvmevirt_config import load_drive
from vcsd.config import IN_STORAGE, AttachConfig, AttentionOptions
from vcsd.options import MAX_SEED, ModelFolder, OptionError
from vcsd.progress import progress, status
from vcsd.tables import table
from vcsd.timeline import StepRecords, check_timeline_path
from vcsd.transport import check_drives, check_method, fleet_or_count, methods_of
from vcsd_cli.shared import Output, OutputOption, importing, print_json, stdout
from vcsd_cli.tiers import TierLimitOptions, check_limits

if TYPE_CHECKING:
    import torch

    from vcsd.generate import Continuation, OnToken, ReferenceMatch
    from vcsd.step_times import StepTimes


POLICY_HELP = (
    f"placement policy: {', '.join(filter(moves_blocks, POLICIES))}, or FILE:NAME (default: {IN_STORAGE}, in drives)"
)
DRIVES = "2"  # default
DRIVES_METAVAR = "N|ray|ray://HOST:PORT"
SHOWN_CHARACTERS = 160  # of a prompt

Options = TypeVar("Options", bound=AttachConfig)


class Processor(StrEnum):
    """Device of the model."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Prompt, length of the continuation, and the comparison."""

    prompt: Annotated[str | None, typer.Option(help="prompt (default: a bundled text)")] = None
    prompt_file: Annotated[Path | None, typer.Option(help="file that contains the prompt")] = None
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="tokens to generate")] = 128
    batch: Annotated[int, typer.Option(min=1, max=1024, help="rows; rows after the first start inside the prompt")] = 1
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed for the start offsets of these rows")] = 0
    compare: Annotated[bool, typer.Option(help="compare with sdpa, and step times of methods")] = True

    def read(self) -> str:
        """Read the prompt."""
        if self.prompt is not None and self.prompt_file is not None:
            raise OptionError("--prompt and --prompt-file exclude each other")
        if self.prompt is not None:
            return self.prompt
        source = self.prompt_file or files("vcsd") / "shipped" / "prompt.txt"
        try:
            return source.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error


@frozen_part
class MethodOptions(AttentionOptions):
    """Attention method and budget; SparF's parameters themselves are another way to give it."""

    sparf_channels: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="channels of q and K; replaces --compression")
    ] = None
    sparf_tokens: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="tokens; replaces --compression")] = None
    sparf_recent: Annotated[
        int | None, typer.Option(min=0, max=1 << 20, help="most recent tokens among them (default: k / 4)")
    ] = None

    def attention(self) -> AttentionConfig:
        """Method, budget and layout of the options. Dense attention uses all KV data."""
        r, k, recent = self.sparf_channels, self.sparf_tokens, self.sparf_recent
        outright = [value is not None for value in (r, k, recent)]
        if any(outright) and self.compression is not None:
            raise OptionError("--compression and --sparf-channels, --sparf-tokens, --sparf-recent exclude each other")
        attention = AttentionOptions.attention(self)
        if attention.method == "dense":
            return replace(attention, budget=CompressionBudget(1))
        if not any(outright):
            return attention
        if r is None or k is None:
            raise OptionError("--sparf-channels and --sparf-tokens are needed together")
        return replace(attention, budget=FixedBudget(SparFParams(r, k, -(-k // 4) if recent is None else recent)))


def parse_drives(text: object) -> str:
    """Parse a number of drives, or the transport of a fleet, which determines the number."""
    words = str(text)
    is_number = words.isascii() and words.isdigit() and 1 <= int(words) <= MAX_DRIVES
    if not is_number and words.partition(":")[0] != "ray":
        raise typer.BadParameter(f"{words!r} is not a number from 1 to {MAX_DRIVES}, ray or ray://HOST:PORT")
    return words


DriveFile = Annotated[Path | None, typer.Option(help="YAML description of the drives (default: the paper's)")]


def drive_set(options: DriveOptions, drives: str | None, drive_config: Path | None, spares: int = 0) -> DriveSetConfig:
    """The set of drives of the options, and `spares` more that replace lost ones."""
    drives = drives or DRIVES
    if not drives.isdigit() and options.transport != "inproc":
        raise OptionError(f"--drives {drives} and --transport exclude each other")
    count, transport = fleet_or_count(int(drives) if drives.isdigit() else drives, options.transport)
    spec = load_drive(drive_config) if drive_config else options.spec
    return DriveSetConfig.of(options, count=count, spec=spec, transport=transport, spares=spares)


@frozen_part
class CreatedDriveOptions(MethodOptions):
    """Drives; of the commands that run models."""

    drives: Annotated[
        str | None,
        typer.Option(
            parser=parse_drives,
            metavar=DRIVES_METAVAR,
            help=f"drives that share the KV heads, or a fleet's (default: {DRIVES}, or none if the policy uses none)",
        ),
    ] = None
    drive_config: DriveFile = None


@frozen_value
class RunOptions(CreatedDriveOptions, AttachConfig):
    """Drives; of `vcsd run`."""

    policy: Annotated[str | None, typer.Option(help=POLICY_HELP)] = None
    timeline: Annotated[
        Path | None,
        typer.Option(help="file for the last decode step in simulated time: .json for Perfetto, .svg or .png"),
    ] = None

    def drive_set(self) -> DriveSetConfig:
        return drive_set(self, self.drives, self.drive_config, self.spares)


def run(
    text: PromptOptions,
    options: RunOptions,
    tiers: TierLimitOptions,
    model: ModelFolder = None,
    device: Annotated[Processor, typer.Option(help="device of the model")] = Processor.CPU,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Generate text with the KV cache in drives or in tiers; compare with sdpa."""
    prompt = text.read()
    options = _checked(options, tiers)
    with status("loading the model"):
        with importing():
            from host_driver.hf.shape import placement
            from vcsd.capacity_check import check_attached, check_cache
            from vcsd.generate import agreement, continue_text
            from vcsd.loading import CHECKPOINT, encode, load
            from vcsd.session import attention_of
            from vcsd.step_times import time_steps

        path = model or CHECKPOINT
        loaded, tokenizer = load(path, device)
        shape = placement(loaded).shape
        attention = attention_of(options, loaded, shape)
        inputs = encode(loaded, tokenizer, prompt, text.batch, text.max_new_tokens, text.seed)
        rows, longest = inputs["input_ids"].shape[0], inputs["input_ids"].shape[1] + text.max_new_tokens
        if options.tiers:
            options = replace(options, tiers=replace(options.tiers, max_tokens=longest))
        else:
            check_attached(options, attention, shape, rows, longest)
        if text.compare and device is Processor.CPU:
            check_cache(shape, loaded.dtype.itemsize, rows, longest)
    records = StepRecords(FirstSteps() if text.compare else None, options.timeline)
    if output is Output.NORMAL:
        parameters = loaded.num_parameters() if path == CHECKPOINT else None
        _show_prompt(prompt, inputs["input_ids"].shape[1], parameters)
    stream = _TextStream(tokenizer, inputs["input_ids"][0].tolist())
    with _show_progress(stream, output, text.max_new_tokens) as on_token:
        done = continue_text(loaded, tokenizer, inputs, text.max_new_tokens, options, on_token, records.watch)
    if output is Output.NORMAL:
        stream.end(done.text)
    agreed, times = None, None
    if text.compare:
        with progress("ordinary attention", text.max_new_tokens) as tick:
            agreed = agreement(loaded, inputs, text.max_new_tokens, options, done, tick)
    setup = _attention_figures(options, attention, done.stored, shape.head_dim) | records.write()
    recorded = records.first if records.first and records.first.steps else None
    if output is Output.NORMAL:
        _show(done, setup, agreed, "the bundled checkpoint" if path == CHECKPOINT else path.name, bool(recorded))
    if recorded and options.in_drives:  # only a driver records
        with status("timing other methods"):
            times = time_steps(recorded, options.method or attention.method, attention, options.methods_file)
    if output is Output.JSON:
        figures = {key: value for key, value in asdict(shape).items() if key != "name"}
        print_json({"model": {"name": path.name, **figures}, **setup, **_figures(done, agreed, times)})
    elif times:
        stdout().print(times)


def _checked(options: RunOptions, tiers: TierLimitOptions) -> RunOptions:
    """Options that are checked before the model is loaded."""
    check_limits(options, tiers)
    if not options.in_drives:
        return replace(options, tiers=tiers.limits(), record=True)
    if options.timeline:
        check_timeline_path(options.timeline)
    return with_checked_drives(options)


def with_checked_drives(options: Options) -> Options:
    """Options whose drives can be opened and know the method; a fleet is asked once for its size."""
    drives = options.drive_set()
    assert isinstance(drives, DriveSetConfig), "the command line has no devices of a caller"
    check_drives(drives)
    check_method(options.attention(), methods_of(drives))
    return replace(options, drives=str(drives.count), transport=drives.transport)


def _attention_figures(options: RunOptions, attention: AttentionConfig, stored: int, head_dim: int) -> dict[str, Any]:
    """Method and parameters at `stored` tokens, for JSON output."""
    if not options.in_drives:
        return {"attention": "the model's own"}
    params, layout = attention.at(stored, head_dim), attention.kv_layout
    return {
        "attention": attention.method,
        "convention": getattr(attention.budget, "convention", "paper"),
        "r": params.r,
        "k": params.k,
        "l": params.l,
        "layout": layout.name,
        "lossy": layout.lossy,
    }


def _figures(done: Continuation, agreed: ReferenceMatch | None, times: StepTimes | None) -> dict[str, Any]:
    """JSON output of a run."""
    return {
        "text": done.text,
        "tokens": done.tokens,
        "agreement": asdict(agreed) if agreed else None,
        "step_comparison": asdict(times) if times else None,
        **done.report.to_dict(),
        "wall_s": done.wall_s,
    }


def _show_prompt(prompt: str, tokens: int, copying_parameters: int | None) -> None:
    """Print the end of a prompt; and what the bundled model is, by its number of parameters, if it reads it."""
    if copying_parameters:
        size = f"{copying_parameters / 1e6:.1f} M parameters"
        print(f"The bundled model has {size}, reads bytes, and only copies: it goes on with what followed an")
        print("earlier occurrence of its last words. Other prompts give nonsense; --model takes a language model.\n")
    cut = "... " if len(prompt) > SHOWN_CHARACTERS else ""
    print(f"Prompt ({tokens:,} tokens):\n{cut}{prompt[-SHOWN_CHARACTERS:]}\n", flush=True)


def _show(
    done: Continuation, setup: dict[str, Any], agreed: ReferenceMatch | None, model: str, step_times_follow: bool
) -> None:
    """Print a run's tables after the text."""
    selected = [str(setup[name]) for name in ("r", "k", "l") if name in setup]
    compared = (
        (
            ("greedy tokens equal", "yes" if agreed.tokens_equal else "no"),
            ("same best token, on the reference's text", f"{agreed.top1_match_rate:.1%}"),
            ("largest logit difference", f"{agreed.max_abs_logit_diff:.4f}"),
        )
        if agreed
        else ()
    )
    rows = (
        ("model", model),
        *([("r, k, l at the last step", ", ".join(selected))] if selected else []),
        *([("layout", f"{setup['layout']}, lossy, {setup['lossy']}")] if setup.get("lossy") else []),
        *compared,
        ("emulator wall time, s", f"{done.wall_s:.1f}"),
    )
    title = "Agreement with ordinary attention" if agreed else "Not compared with ordinary attention"
    shown = table(f"{title} ({setup['attention']})", ("what", "figure"), rows)
    report = done.report
    stdout().print(shown, report.tables(timed=False) if step_times_follow else report)


@contextmanager
def _show_progress(stream: _TextStream, output: Output, tokens: int) -> Iterator[OnToken]:
    """Stream the text to a terminal; otherwise show progress, and the text is printed as a whole."""
    with ExitStack() as waiting:
        if output is Output.NORMAL and sys.stdout.isatty():
            waiting.enter_context(status("reading the prompt"))
            stream.begin = waiting.close
            yield stream
        else:
            yield waiting.enter_context(progress("decoding", tokens))


class _TextStream:
    """Prints row 0's tokens as they are generated; waits while a character is incomplete.

    It begins with the second token: drives compute from then on, and kernels are compiled by that time.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int]) -> None:
        self.tokenizer, self.prompt_ids = tokenizer, prompt_ids
        self.begin: Callable[[], None] = lambda: None  # called before the first print
        self.ids: list[int] = []
        self.shown: int | None = None

    def __call__(self, tokens: torch.Tensor) -> None:
        from vcsd.loading import continuation

        self.ids.append(int(tokens[0]))
        text = continuation(self.tokenizer, self.prompt_ids, self.ids)
        if len(self.ids) > 1 and not text.endswith("\ufffd"):
            self._show(text)

    def end(self, text: str) -> None:
        """Print the rest of the text, and end the line."""
        self._show(text)
        print("\n", flush=True)

    def _show(self, text: str) -> None:
        if self.shown is None:
            self.begin()
            print("Continuation:")
        print(text[self.shown or 0 :], end="", flush=True)
        self.shown = len(text)
