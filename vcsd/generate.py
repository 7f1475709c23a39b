"""Continue a prompt with attention in drives, and say how far that is from the same model's ordinary attention."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from csd_link.driveset import DriveSet
from csd_spec import SparFParams
from vcsd.attached import Setting, attached
from vcsd.loading import continuation
from vcsd.report import Report

Inputs = dict[str, torch.Tensor]  # input_ids and attention_mask, each (B, tokens)
OnToken = Callable[[torch.Tensor], None]  # called with each step's new token ids, (B,)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a run in drives compares with sdpa. The logits are compared on the reference's tokens."""

    tokens_equal: bool
    max_abs_logit_diff: float
    top1_rate: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Row 0's text and tokens, agreement over all rows, and the cost of the run in drives."""

    text: str
    tokens: list[int]
    last_params: SparFParams
    agreement: Agreement
    report: Report
    wall_s: float


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Inputs,
    new_tokens: int,
    setting: Setting,
    on_token: OnToken | None = None,
    on_reference_token: OnToken | None = None,
) -> Comparison:
    """Greedy decoding in drives, beside the same model's sdpa."""
    began = time.perf_counter()
    with attached(model, setting) as csd:
        tokens, logits = generate(model, inputs, new_tokens, on_token)
        report, shape = csd.report(), csd.driver.shape
        wall_s = time.perf_counter() - began
    expected, wanted = generate(model, inputs, new_tokens, on_reference_token)
    equal = torch.equal(tokens, expected)
    if not equal:
        with attached(model, _unkept(setting)):
            logits = _force(model, inputs, expected)
    stored = inputs["input_ids"].shape[1] + tokens.shape[1] - 1
    return Comparison(
        text=continuation(tokenizer, inputs["input_ids"][0].tolist(), tokens[0].tolist()),
        tokens=tokens[0].tolist(),
        last_params=setting.attention.at(stored, shape.head_dim),
        agreement=Agreement(
            tokens_equal=equal,
            max_abs_logit_diff=float((logits - wanted).abs().max()),
            top1_rate=float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()),
        ),
        report=report,
        wall_s=wall_s,
    )


def _unkept(setting: Setting) -> Setting:
    """The same on drives that nobody looks at afterwards."""
    drives = setting.drives
    return replace(setting, drives=replace(drives, keep=None)) if isinstance(drives, DriveSet) else setting


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
