"""Continue a prompt with attention in drives, and say how far that is from the same model's ordinary attention."""

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
from vcsd.loading import continuation

Inputs = dict[str, torch.Tensor]  # input_ids and attention_mask, each (B, tokens)
OnToken = Callable[[torch.Tensor], None]  # called with each step's new token ids, (B,)


class Attachable(Protocol):
    """Where a model's K and V may be instead of in its own cache: drives, or tiers."""

    def attached(self, model: PreTrainedModel) -> AbstractContextManager[Any]:
        """The model attached; what the block gets has a `report()`."""
        ...

    def stored(self, dtype: torch.dtype, latent: bool) -> Attachable:
        """The same, with values stored as a model that computes in `dtype` has them. latent: V is a part of K."""
        ...

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError for a model that cannot be served so."""
        ...

    def sized(self, shape: ModelShape, rows: int, max_tokens: int) -> Attachable:
        """The same for so many sequences of at most so many tokens; raises ValueError where they have no room."""
        ...

    def asked(self, stored: int, head_dim: int) -> dict[str, Any]:
        """What attends, for programs, and its parameters when so many tokens are stored."""
        ...

    def unkept(self) -> AbstractContextManager[Attachable]:
        """The same until the block ends, where nobody looks at it afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a run elsewhere compares with sdpa. The logits are compared on the reference's tokens."""

    tokens_equal: bool
    max_abs_logit_diff: float
    top1_rate: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """Row 0's text and tokens, and the cost of the run. stored: tokens of a row at its end."""

    text: str
    tokens: list[int]
    stored: int
    report: Any
    wall_s: float


@dataclass(frozen=True, slots=True)
class Comparison(Continuation):
    """The same, and agreement over all rows."""

    agreement: Agreement


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Inputs,
    new_tokens: int,
    setting: Attachable,
    on_token: OnToken | None = None,
) -> Continuation:
    """Greedy decoding in drives or tiers."""
    return _continue(model, tokenizer, inputs, new_tokens, setting, on_token)[0]


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Inputs,
    new_tokens: int,
    setting: Attachable,
    on_token: OnToken | None,
) -> tuple[Continuation, torch.Tensor, torch.Tensor]:
    """The continuation, and token ids and logits as `generate` returns them."""
    began = time.perf_counter()
    with setting.attached(model) as elsewhere:
        tokens, logits = generate(model, inputs, new_tokens, on_token)
        report = elsewhere.report()
        wall_s = time.perf_counter() - began
    prompt, new = inputs["input_ids"][0].tolist(), tokens[0].tolist()
    stored = len(prompt) + tokens.shape[1] - 1
    return Continuation(continuation(tokenizer, prompt, new), new, stored, report, wall_s), tokens, logits


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Inputs,
    new_tokens: int,
    setting: Attachable,
    on_token: OnToken | None = None,
    on_reference_token: OnToken | None = None,
) -> Comparison:
    """Greedy decoding in drives or tiers, beside the same model's sdpa."""
    done, tokens, logits = _continue(model, tokenizer, inputs, new_tokens, setting, on_token)
    expected, wanted = generate(model, inputs, new_tokens, on_reference_token)
    equal = torch.equal(tokens, expected)
    if not equal:
        with setting.unkept() as again, again.attached(model):
            logits = _force(model, inputs, expected)
    agreement = Agreement(
        tokens_equal=equal,
        max_abs_logit_diff=float((logits - wanted).abs().max()),
        top1_rate=float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()),
    )
    return Comparison(done.text, done.tokens, done.stored, done.report, done.wall_s, agreement)


class _Streamer(transformers.generation.streamers.BaseStreamer):
    """Hands over new tokens as they come; the first call of `put` brings the prompt."""

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
    """Logits (steps, B, vocabulary) when `tokens` (B, steps) are forced one after the other."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    ids, cache, logits = inputs["input_ids"], None, []
    for step in range(tokens.shape[1]):
        extra = {"position_ids": positions[:, -ids.shape[1] :]} if takes_positions else {}
        out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        cache = out.past_key_values
        logits.append(out.logits[:, -1].float())
        ids = tokens[:, step : step + 1]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = torch.cat([positions, positions[:, -1:] + 1], 1)
    return torch.stack(logits)
