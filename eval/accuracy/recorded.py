"""q, k and v of a model on a text, as its attention gets them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from csd_spec.arrays import F16

TEXT = Path(__file__).parent / "passage.txt"  # the beginning of Coriolanus


@dataclass(frozen=True, slots=True)
class Recorded:
    """One layer's q (B, q_heads, S, d), k and v (B, kv_heads, S, d), positions already encoded."""

    q: F16
    k: F16
    v: F16


@torch.inference_mode()
def record(model: PreTrainedModel, ids: torch.Tensor) -> list[Recorded]:
    """Run a model over tokens (B, S); returns what the attention of each layer was given."""
    layers: list[Recorded] = []

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        layers.append(Recorded(*(part.cpu().half().numpy() for part in (query, key, value))))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("record", attention)
    AttentionMaskInterface.register("record", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("record")
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return layers
