"""Tiny models of any architecture, with random weights."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCABULARY, CONTEXT, WINDOW = 128, 256, 32
MEMORY_BYTES = 4 << 30  # of a model while it is built
EXPERTS = 2  # all take part: which of nearly tied ones do would be a matter of rounding
SIZES = (
    ("vocab_size n_words", VOCABULARY),
    ("max_position_embeddings n_positions max_target_positions max_seq_len seq_length", CONTEXT),
    ("num_hidden_layers n_layer n_layers num_layers layers decoder_layers encoder_layers num_decoder_layers", 4),
    ("num_encoder_layers depth encoder_depth", 1),
    ("hidden_size n_embd d_model dim embedding_size word_embed_proj_dim attention_hidden_size emb_dim embed_dim", 64),
    ("intermediate_size ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim shared_intermediate_size out_hidden_size", 64),
    ("mlp_intermediate_size block_ff_dim ff_dim ffn_hidden_size dense_intermediate_size mlp_hidden_size", 64),
    ("moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size", 32),
    ("shared_expert_intermediate_size", 32),
    ("num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads", 4),
    ("num_key_value_heads attention_heads", 4),
    ("head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim attention_head_dim global_head_dim kv_channels", 16),
    ("rotary_dim", 8),
    ("sliding_window window_size attention_window attention_chunk_size local_attention", WINDOW),
    ("q_lora_rank kv_lora_rank o_lora_rank hidden_size_per_layer_input", 16),
    ("num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts", EXPERTS),
    ("num_experts_per_tok moe_k moe_top_k top_k_experts moe_topk num_experts_per_token", EXPERTS),
    ("n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace", 1),
)
LAYERS = SIZES[2][0].split()  # the decoder gets the same number as an encoder
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# also where the default is None
NEEDED = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts")
TABLE = {name: size for names, size in SIZES for name in names.split()}


def architectures() -> list[str]:
    """Model types of all decoders of the installed transformers, of text first, then those that see images."""
    names = dict.fromkeys(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return list(names | dict.fromkeys(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))


def build(name: str, spread: float, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model of an architecture with random FP32 weights, scaled by `spread`.

    Any exception of a config of defaults and small sizes propagates.
    """
    config_class = CONFIG_MAPPING[name]
    causal, seeing = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class = (causal if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else seeing)[config_class]
    torch.manual_seed(seed)
    config = shrink(config_class())
    if model_class.config_class == config.sub_configs.get("text_config"):
        config = config.text_config
    with _little_memory():
        model: PreTrainedModel = model_class._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(spread)
    return model


def shrink(config: PreTrainedConfig, sees: bool = False) -> PreTrainedConfig:
    """A config of the same class, its parts too, with small sizes; what kinds of layers there are stays as it is.

    sees: whether it is a part of a model of images, whose positions may have several axes.
    """
    sees |= "vision_config" in config.__dict__
    changed: dict[str, Any] = {}
    kinds = config.__dict__.get("layer_types") or ()
    layers = 1 + kinds.index("full_attention") if "full_attention" in kinds else 0  # so that there is one of them
    for name, value in config.to_dict().items():
        part = config.__dict__.get(name)
        if isinstance(part, PreTrainedConfig):
            changed[name] = shrink(part, sees)
        elif name == "is_decoder" and not config.is_encoder_decoder:
            changed[name] = True
        elif isinstance(value, int) and not isinstance(value, bool):
            if name in TABLE:
                changed[name] = max(TABLE[name], layers) if name in LAYERS else min(value, TABLE[name])
            elif name.endswith("token_id") and value >= VOCABULARY:
                changed[name] = 3 + sum(name.encode()) % 97  # a token of its own, most likely
        elif value is None and name in NEEDED:
            changed[name] = TABLE[name]
        elif isinstance(value, dict) and ("mrope_section" in value or (sees and "rope_type" in value)):
            changed[name] = value | {"mrope_section": _sections(int(8 * value.get("partial_rotary_factor", 1)))}
    of_v = config.__dict__.get("v_head_dim")
    if of_v and "kv_lora_rank" not in config.__dict__ and of_v < config.__dict__.get("head_dim", 0):
        changed["v_head_dim"] = TABLE["v_head_dim"] // 2  # as before it has fewer channels than K
    heads = next((config.__dict__[name] for name in HEADS if name in config.__dict__), None)
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv"):
        if kept := config.__dict__.get(name):
            changed[name] = 4 if kept == heads else min(kept, 2)
    return type(config)(**changed)


def _sections(pairs: int) -> list[int]:
    """How many of the pairs of channels of a head of 16 turn with each of three axes."""
    first = pairs // 4
    second = (pairs - first) // 2
    return [first, second, pairs - first - second]


@contextmanager
def _little_memory() -> Iterator[None]:
    """Limit memory: sizes that are not in the table may be those of a large model, and must raise MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
