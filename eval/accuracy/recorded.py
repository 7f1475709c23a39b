"""q, k and v of a model on a text, as its attention gets them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from csd_spec.arrays import F16
from vcsd.progress import Tick, no_tick

TEXT = Path(__file__).parent / "passage.txt"  # the beginning of Coriolanus


@dataclass(frozen=True, slots=True)
class Recorded:
    """One layer's q (B, q_heads, S, d), k and v (B, kv_heads, S, d), positions already encoded."""

    q: F16
    k: F16
    v: F16


@torch.inference_mode()
def record(
    model: PreTrainedModel, ids: torch.Tensor, layers: Collection[int] | None = None, tick: Tick = no_tick
) -> list[Recorded]:
    """Run a model over tokens, a sequence at a time, and keep what the attention of its layers was given.

    Args:
        model: A decoder whose attention goes through transformers' `AttentionInterface`.
        ids: Tokens, (B, S).
        layers: Numbers of the layers that are kept (default: all); the others cost no memory.
        tick: Called after each sequence.

    Returns:
        The kept layers in their order.
    """
    parts: list[list[Recorded]] = []
    calls = 0

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal calls
        if layers is None or calls in layers:
            parts[-1].append(Recorded(*(part.cpu().half().numpy() for part in (query, key, value))))
        calls += 1
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("record", attention)
    AttentionMaskInterface.register("record", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("record")
    try:
        for row in ids:
            calls = 0
            parts.append([])
            model(input_ids=row[None].to(model.device), use_cache=False, logits_to_keep=1)
            tick(None)
    finally:
        model.set_attn_implementation(before)
    return [
        Recorded(*(np.concatenate([getattr(each, name) for each in layer]) for name in ("q", "k", "v")))
        for layer in zip(*parts, strict=True)
    ]
