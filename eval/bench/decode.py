"""How fast the emulator is, beside the same model without it. Wall time, never modelled time."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

import vcsd
from eval.experiment import Outcome
from vcsd.loading import CHECKPOINT
from vcsd.loading import load as load_model
from vcsd.options import ModelFolder
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table

ATTENTIONS = ("sdpa", "dense", "sparf")


@dataclass(frozen=True, slots=True)
class Load:
    """What is decoded, and how often."""

    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="prompt length")] = 1024
    steps: Annotated[int, typer.Option(min=1, max=1 << 20, help="decode steps a run")] = 16
    drives: Annotated[int, typer.Option(min=1, max=1024, help="virtual drives")] = 2
    batch: Annotated[int, typer.Option(min=1, max=1024, help="sequences")] = 4
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="runs that count")] = 5


@torch.inference_mode()
def bench_decode(model: PreTrainedModel, load: Load, tick: Tick = no_tick) -> dict[str, Any]:
    """Wall milliseconds of a decode step after a prompt of random tokens: ordinary attention and drives.

    The ways take turns, `repeats` times; medians are reported, and how many times ordinary attention's wall time
    the emulator takes.
    """
    torch.manual_seed(0)
    prompt = torch.randint(1, model.config.vocab_size, (load.batch, load.tokens))
    taken: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    for _ in range(load.repeats + 1):
        for name in ATTENTIONS:
            taken[name].append(_step_ms(model, prompt, load, name))
            tick(None)
    median = {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first run compiles
    slowdown = {name: ms / median["sdpa"] for name, ms in median.items()}
    setting = {"tokens": load.tokens, "batch": load.batch, "drives": load.drives}
    return setting | {"step_ms": median, "wall_over_sdpa": slowdown}


def _step_ms(model: PreTrainedModel, prompt: torch.Tensor, load: Load, name: str) -> float:
    if name == "sdpa":
        return _timed(model, prompt, load.steps)
    with vcsd.attach(model, drives=load.drives, attention=name):
        return _timed(model, prompt, load.steps)


def _timed(model: PreTrainedModel, prompt: torch.Tensor, steps: int) -> float:
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    began = time.perf_counter()
    for _ in range(steps):
        best = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=best, past_key_values=out.past_key_values, use_cache=True)
    return (time.perf_counter() - began) / steps * 1e3


def experiment(load: Load, model: ModelFolder = None) -> Outcome:
    """Wall time of a decode step: ordinary attention against emulated drives."""
    loaded, _ = load_model(model or CHECKPOINT)
    if load.tokens + load.steps > loaded.config.max_position_embeddings:
        raise ValueError(f"tokens = {load.tokens}: the model's context is {loaded.config.max_position_embeddings}")
    with progress("runs", (load.repeats + 1) * len(ATTENTIONS)) as tick:
        result = bench_decode(loaded, load, tick)
    title = f"Decode step, {load.batch} x {load.tokens} tokens, {load.drives} drives (wall time)"
    rows = [(name, f"{ms:.1f}", f"{result['wall_over_sdpa'][name]:.2f}x") for name, ms in result["step_ms"].items()]
    return Outcome(result, [table(title, ("attention", "ms", "of sdpa's"), rows)])
