"""Continues a prompt with the KV cache in drives or tiers, and compares the result with the model's own sdpa."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from csd_spec import ModelShape
from host_driver.driver import Driver
from host_driver.hf.cache_argument import forward_on
from vcsd.loading import continuation
from vcsd.session import DriveSession

Inputs = dict[str, torch.Tensor]  # input_ids and attention_mask, each (B, tokens)
OnToken = Callable[[torch.Tensor], None]  # called with each step's new token ids, (B,)


class Attachable(Protocol):
    """Configuration of a place for the KV cache: drives or tiers."""

    def attach(self, model: PreTrainedModel) -> AbstractContextManager[Any]:
        """Attach a model; the context's value has a `report()`."""
        ...

    def stored(self, dtype: torch.dtype, latent: bool) -> Attachable:
        """Copy with the stored data type of a model that computes in `dtype`; `latent`: V is a part of K."""
        ...

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError if a model is not supported."""
        ...

    def check_capacity(self, shape: ModelShape, rows: int, max_tokens: int) -> Attachable:
        """Copy for `rows` sequences of up to `max_tokens`; raises ValueError if they do not fit."""
        ...

    def describe(self, stored: int, head_dim: int) -> dict[str, Any]:
        """Method and parameters at `stored` tokens, for JSON output."""
        ...

    def without_data_dir(self) -> AbstractContextManager[Attachable]:
        """Copy with temporary drives."""
        ...


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
    report: Any
    wall_s: float
    rows: torch.Tensor
    logits: torch.Tensor


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Inputs,
    new_tokens: int,
    setting: Attachable,
    on_token: OnToken | None = None,
    on_driver: Callable[[Driver], None] | None = None,
) -> Continuation:
    """Decode greedily in drives or tiers; `on_driver` is called before the prefill if there are drives."""
    began = time.perf_counter()
    with setting.attach(model) as elsewhere:
        if on_driver and isinstance(elsewhere, DriveSession):
            on_driver(elsewhere.driver)
        tokens, logits = generate(model, inputs, new_tokens, on_token)
        report = elsewhere.report()
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
    setting: Attachable,
    done: Continuation,
    on_token: OnToken | None = None,
) -> ReferenceMatch:
    """Decode with the model's own sdpa, and compare all rows of a run with it."""
    expected, wanted = generate(model, inputs, new_tokens, on_token)
    equal, logits = torch.equal(done.rows, expected), done.logits
    if not equal:
        with setting.without_data_dir() as again, again.attach(model):
            logits = _force(model, inputs, expected)
    return ReferenceMatch(
        tokens_equal=equal,
        max_abs_logit_diff=float((logits - wanted).abs().max()),
        top1_match_rate=float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()),
    )


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
