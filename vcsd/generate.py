"""Continue a prompt with attention in drives, and say how far that is from the same model's ordinary attention."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import vcsd
from csd_spec import Budget, DriveSpec, SparFParams
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.report import Report

CHECKPOINT = Path(__file__).parent / "shipped" / "checkpoint"
PROMPT = Path(__file__).parent / "shipped" / "prompt.txt"

OnToken = Callable[[torch.Tensor], None]  # called with each step's new token ids, (B,)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a run in drives compares with sdpa. The logits are compared on the reference's tokens."""

    tokens_equal: bool
    max_abs_logit_diff: float
    top1_rate: float


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of `decode`: row 0's text and tokens, agreement over all rows, and the cost of the run in drives."""

    text: str
    tokens: list[int]
    last_params: SparFParams
    agreement: Agreement
    report: Report
    wall_s: float


def load(path: Path, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A decoder and its tokenizer from a folder, in FP32 on the CPU and in its own dtype elsewhere."""
    if not (path / "config.json").is_file():
        raise ValueError(f"no model at {path}: a folder with config.json, weights and tokenizer is needed")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = cuda: no GPU that torch can use")
    dtype: Any = torch.float32 if device == "cpu" else "auto"
    options: Any = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a broken folder fails in many ways, each with a type of its own
        raise ValueError(f"cannot load the model at {path}: {error}") from error
    return model.to(device).eval(), tokenizer


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, batch: int, new_tokens: int, seed: int
) -> dict[str, torch.Tensor]:
    """Row 0 is the prompt; further rows begin at random places of its first half and are padded on the left."""
    if batch < 1 or new_tokens < 1:
        raise ValueError(f"batch = {batch}, max_new_tokens = {new_tokens}: both must be at least 1")
    ids = tokenizer(prompt)["input_ids"]
    if not prompt.strip() or not ids:
        raise ValueError("the prompt is empty")
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context and len(ids) + new_tokens > context:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, with {new_tokens} new ones beyond the model's context of {context}"
        )
    draw = random.Random(seed)
    starts = [0, *(draw.randrange(max(1, len(ids) // 2)) for _ in range(batch - 1))]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    rows = [[pad] * start + ids[start:] for start in starts]
    mask = [[0] * start + [1] * (len(ids) - start) for start in starts]
    return {
        "input_ids": torch.tensor(rows, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


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
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], new_tokens: int, on_token: OnToken | None
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


def _force(model: PreTrainedModel, inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits (steps, B, vocabulary) when `tokens` (B, steps) are forced one after the other."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in model.forward.__wrapped__.__code__.co_varnames
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


def continuation(tokenizer: PreTrainedTokenizerBase, before: list[int], new: list[int]) -> str:
    """The text of new tokens behind others. Some tokenizers drop the space before a text's first word."""
    led: str = tokenizer.decode([before[-1], *new], skip_special_tokens=True)
    lead: str = tokenizer.decode([before[-1]], skip_special_tokens=True)
    return led[len(lead) :] if led.startswith(lead) else tokenizer.decode(new, skip_special_tokens=True)


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    new_tokens: int,
    drives: int,
    attention: str,
    budget: Budget,
    tokenizer: PreTrainedTokenizerBase,
    on_token: OnToken | None = None,
    on_reference_token: OnToken | None = None,
    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH,
    keep: Path | None = None,
    embedding_bits: int = 16,
    transport: str = "inproc",
    flush_every: int = 0,
    restart: bool = True,
    methods: Path | None = None,
) -> Decoded:
    """Greedy decoding in drives, beside the same model's sdpa. keep: a folder in which the drives stay."""
    began = time.perf_counter()
    how: Any = {"attention": attention, "budget": budget, "spec": spec, "embedding_bits": embedding_bits}
    how |= {"transport": transport, "flush_every": flush_every, "restart": restart, "methods": methods}
    with vcsd.attach(model, drives, keep=keep, **how) as csd:
        tokens, logits = generate(model, inputs, new_tokens, on_token)
        report, shape = csd.report(), csd.driver.shape
        wall_s = time.perf_counter() - began
    expected, wanted = generate(model, inputs, new_tokens, on_reference_token)
    equal = torch.equal(tokens, expected)
    if not equal:
        with vcsd.attach(model, drives, **how):
            logits = _force(model, inputs, expected)
    stored = inputs["input_ids"].shape[1] + tokens.shape[1] - 1
    return Decoded(
        text=continuation(tokenizer, inputs["input_ids"][0].tolist(), tokens[0].tolist()),
        tokens=tokens[0].tolist(),
        last_params=budget.at(stored, shape.head_dim),
        agreement=Agreement(
            tokens_equal=equal,
            max_abs_logit_diff=float((logits - wanted).abs().max()),
            top1_rate=float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()),
        ),
        report=report,
        wall_s=wall_s,
    )
