"""Loads a decoder and its tokenizer from a folder; encodes prompts and decodes outputs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from vcsd.models import find_model

CHECKPOINT = Path(__file__).parent / "shipped" / "checkpoint"
PROMPT = Path(__file__).parent / "shipped" / "prompt.txt"


def load(path: Path, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder and its tokenizer by folder or name; FP32 on the CPU, the model's own dtype on a GPU."""
    path = find_model(path)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = cuda: torch finds no usable GPU: use device = cpu")
    dtype: Any = torch.float32 if device == "cpu" else "auto"
    options: Any = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a broken folder raises various exceptions
        raise ValueError(f"cannot load the model at {path}: {error}") from error
    return model.to(device).eval(), tokenizer


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, batch: int, new_tokens: int, seed: int
) -> dict[str, torch.Tensor]:
    """Encode a batch: row 0 is the prompt; others start at random offsets in its first half, padded on the left."""
    ids = tokenizer(prompt)["input_ids"]
    if not prompt.strip() or not ids:
        raise ValueError("the prompt is empty: pass a text with at least one token")
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


def continuation(tokenizer: PreTrainedTokenizerBase, before: list[int], new: list[int]) -> str:
    """Decode new tokens after others; keeps the leading space that some tokenizers drop at the start of a text."""
    led: str = tokenizer.decode([before[-1], *new], skip_special_tokens=True)
    lead: str = tokenizer.decode([before[-1]], skip_special_tokens=True)
    return led[len(lead) :] if led.startswith(lead) else tokenizer.decode(new, skip_special_tokens=True)
