"""How fast the emulator is, beside the same model without it. Wall time, never modelled time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import vcsd

ATTENTIONS = ("sdpa", "dense", "sparf")


@torch.inference_mode()
def bench_decode(
    model: PreTrainedModel,
    tokens: int,
    steps: int,
    drives: int,
    batch: int,
    repeats: int,
    tick: Callable[[object], None] | None = None,
) -> dict[str, Any]:
    """Wall milliseconds of a decode step after a prompt of `tokens` random tokens: ordinary attention and drives.

    The ways take turns, `repeats` times; medians are reported, and how many times ordinary attention's wall time
    the emulator takes.
    """
    torch.manual_seed(0)
    prompt = torch.randint(1, model.config.vocab_size, (batch, tokens))
    taken: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    for _ in range(repeats + 1):
        for name in ATTENTIONS:
            taken[name].append(_step_ms(model, prompt, steps, drives, name))
            if tick:
                tick(None)
    median = {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first run compiles
    slowdown = {name: ms / median["sdpa"] for name, ms in median.items()}
    return {"tokens": tokens, "batch": batch, "drives": drives, "step_ms": median, "wall_over_sdpa": slowdown}


def _step_ms(model: PreTrainedModel, prompt: torch.Tensor, steps: int, drives: int, name: str) -> float:
    if name == "sdpa":
        return _timed(model, prompt, steps)
    with vcsd.attach(model, drives=drives, attention=name):
        return _timed(model, prompt, steps)


def _timed(model: PreTrainedModel, prompt: torch.Tensor, steps: int) -> float:
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    began = time.perf_counter()
    for _ in range(steps):
        best = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=best, past_key_values=out.past_key_values, use_cache=True)
    return (time.perf_counter() - began) / steps * 1e3
