"""Continues a prompt with the KV cache in drives or tiers, and compares the result with the model's own sdpa."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from host_driver.driver import Driver
from host_driver.hf.cache_argument import forward_on
from vcsd.config import AttachConfig
from vcsd.loading import continuation
from vcsd.report import Report
from vcsd.session import attach

Inputs = dict[str, torch.Tensor]  # input_ids and attention_mask, each (B, tokens)
OnToken = Callable[[torch.Tensor], None]  # called with each step's new token ids, (B,)


@dataclass(frozen=True, slots=True)
class ReferenceMatch:
    """Comparison of a run with sdpa. Logits are compared on the reference's tokens."""

    tokens_equal: bool
    max_abs_logit_diff: float
    top1_match_rate: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """Result of a run, with text and tokens of row 0.

    Attributes:
        stored: Tokens of a row at the end of the run.
        rows: New tokens of all rows, (B, steps).
        logits: Their logits, (steps, B, vocabulary).
    """

    text: str
    tokens: list[int]
    stored: int
    report: Report
    wall_s: float
    rows: torch.Tensor
    logits: torch.Tensor


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Inputs,
    new_tokens: int,
    config: AttachConfig,
    on_token: OnToken | None = None,
    on_driver: Callable[[Driver], None] | None = None,
) -> Continuation:
    """Decode greedily in drives or tiers; `on_driver` is called before the prefill if there are drives."""
    began = time.perf_counter()
    with attach(model, config) as session:
        if on_driver and config.in_drives:
            on_driver(session.driver)
        tokens, logits = generate(model, inputs, new_tokens, on_token)
        report = session.report()
        wall_s = time.perf_counter() - began
    prompt, new = inputs["input_ids"][0].tolist(), tokens[0].tolist()
    stored = len(prompt) + tokens.shape[1] - 1
    text = continuation(tokenizer, prompt, new)
    return Continuation(text, new, stored, report, wall_s, tokens, logits)


@torch.inference_mode()
def agreement(
    model: PreTrainedModel,
    inputs: Inputs,
    new_tokens: int,
    config: AttachConfig,
    done: Continuation,
    on_token: OnToken | None = None,
) -> ReferenceMatch:
    """Decode with the model's own sdpa, and compare all rows of a run with it."""
    expected, wanted = generate(model, inputs, new_tokens, on_token)
    equal, logits = torch.equal(done.rows, expected), done.logits
    if not equal:
        with _without_data_dir(config) as again, attach(model, again):
            logits = _force(model, inputs, expected)
    return ReferenceMatch(
        tokens_equal=equal,
        max_abs_logit_diff=float((logits - wanted).abs().max()),
        top1_match_rate=float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()),
    )


@contextmanager
def _without_data_dir(config: AttachConfig) -> Iterator[AttachConfig]:
    """Configuration with temporary drives; their files, if any, are created next to the kept folder."""
    if not config.data_dir:
        yield config
    elif config.storage.kind == "memory":
        yield replace(config, data_dir=None)
    else:
        data_dir = config.data_dir.absolute()
        with TemporaryDirectory(prefix=f"{data_dir.name}-", dir=data_dir.parent) as folder:
            yield replace(config, data_dir=Path(folder))


class _Streamer(transformers.generation.streamers.BaseStreamer):
    """Passes new tokens to a callback; the first call of `put` has the prompt, which is skipped."""

    def __init__(self, on_token: OnToken | None) -> None:
        self.on_token, self.begun = on_token, False

    def put(self, value: torch.Tensor) -> None:
        if self.begun and self.on_token:
            self.on_token(value.reshape(-1))
        self.begun = True

    def end(self) -> None:
        pass


def generate(
    model: PreTrainedModel, inputs: Inputs, new_tokens: int, on_token: OnToken | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy continuation: token ids (B, steps) and their logits (steps, B, vocabulary)."""
    out = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        streamer=_Streamer(on_token),
    )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits).float()


def _force(model: PreTrainedModel, inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (steps, B, vocabulary) for forced tokens (B, steps)."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    ids, cache, logits = inputs["input_ids"], None, []
    for step in range(tokens.shape[1]):
        extra = {"position_ids": positions[:, -ids.shape[1] :]} if takes_positions else {}
        out, cache = forward_on(model, cache, input_ids=ids, attention_mask=mask, **extra)
        logits.append(out.logits[:, -1].float())
        ids = tokens[:, step : step + 1]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = torch.cat([positions, positions[:, -1:] + 1], 1)
    return torch.stack(logits)
