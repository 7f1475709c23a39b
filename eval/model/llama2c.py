"""llama2.c's `.bin` models and tokenizers as Hugging Face folders.

Layout (karpathy/llama2.c, `export.py`, version 0): seven int32 (width, hidden width, layers, heads, KV heads,
vocabulary, context; a negative vocabulary: the classifier has weights of its own), then FP32 weights, each kind for all
layers. Tokenizer: int32 longest token, then for each token FP32 score, int32 length, bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from csd_spec.arrays import F32

_HEADER = struct.Struct("<7i")


@dataclass(frozen=True, slots=True)
class Header:
    """The shape of a model."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int

    def __post_init__(self) -> None:
        small = all(0 < value < 1 << 20 for value in (self.width, self.hidden, self.layers, self.heads, self.kv_heads))
        if not small or not self.vocabulary or self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"header {self}: must describe a valid model shape")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def convert_model(model: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write a folder that `from_pretrained` loads; returns its shape. Raises ValueError for other or cut files."""
    data = model.read_bytes()
    try:
        header = Header(*_HEADER.unpack_from(data))
        weights = _weights(header, np.frombuffer(data, np.float32, offset=_HEADER.size))
    except (ValueError, struct.error) as error:
        raise ValueError(f"{model}: not a llama2.c model: {error}") from error
    config = LlamaConfig(
        vocab_size=abs(header.vocabulary),
        hidden_size=header.width,
        intermediate_size=header.hidden,
        num_hidden_layers=header.layers,
        num_attention_heads=header.heads,
        num_key_value_heads=header.kv_heads,
        head_dim=header.head_dim,
        max_position_embeddings=header.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=header.vocabulary > 0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.utils.logging.disable_progress_bar()
    converted = LlamaForCausalLM(config)
    converted.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()}, strict=False)
    read_tokenizer(tokenizer, abs(header.vocabulary), header.context).save_pretrained(out)
    converted.save_pretrained(out)
    return {"layers": header.layers, "q_heads": header.heads, "kv_heads": header.kv_heads, "head_dim": header.head_dim}


def _weights(h: Header, floats: F32) -> dict[str, F32]:
    """Hugging Face's names for every weight."""
    kv_width = h.kv_heads * h.head_dim
    table = [
        ("model.embed_tokens.weight", None, (abs(h.vocabulary), h.width)),
        ("input_layernorm.weight", h.layers, (h.width,)),
        ("self_attn.q_proj.weight", h.layers, (h.width, h.width)),
        ("self_attn.k_proj.weight", h.layers, (kv_width, h.width)),
        ("self_attn.v_proj.weight", h.layers, (kv_width, h.width)),
        ("self_attn.o_proj.weight", h.layers, (h.width, h.width)),
        ("post_attention_layernorm.weight", h.layers, (h.width,)),
        ("mlp.gate_proj.weight", h.layers, (h.hidden, h.width)),
        ("mlp.down_proj.weight", h.layers, (h.width, h.hidden)),
        ("mlp.up_proj.weight", h.layers, (h.hidden, h.width)),
        ("model.norm.weight", None, (h.width,)),
        ("", None, (2, h.context, h.head_dim // 2)),  # sines and cosines, which follow from the shape
    ]
    if h.vocabulary < 0:
        table.append(("lm_head.weight", None, (-h.vocabulary, h.width)))
    needed = sum((layers or 1) * int(np.prod(shape)) for _, layers, shape in table)
    if floats.size != needed:
        raise ValueError(f"{floats.size} weights where its header needs {needed}: cut off, or another version")
    weights, at = {}, 0
    for name, layers, shape in table:
        size = int(np.prod(shape))
        for layer in range(layers or 1):
            part = floats[at : at + size].reshape(shape)
            at += size
            if "q_proj" in name or "k_proj" in name:
                part = _halves(part, h.head_dim)
            if name:
                weights[name if layers is None else f"model.layers.{layer}.{name}"] = part
    return weights


def _halves(weight: F32, head_dim: int) -> F32:
    """RoPE turns neighbouring channels there, and channels half a head apart in transformers."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    turned: F32 = pairs.transpose(0, 2, 1, 3).reshape(weight.shape)
    return turned


def read_tokenizer(path: Path, size: int, context: int) -> PreTrainedTokenizerFast:
    """llama2.c's tokenizer: pairs merge by the score of the result, other characters become bytes."""
    data, at = path.read_bytes(), 4
    tokens: list[str] = []
    scores: list[float] = []
    try:
        for _ in range(size):
            score, length = struct.unpack_from("<fi", data, at)
            tokens.append(data[at + 8 : at + 8 + length].decode("utf-8").strip("\n") or "\n")
            scores.append(score)
            at += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a llama2.c tokenizer of {size} tokens, or cut off") from error
    if at != len(data):
        raise ValueError(f"{path}: {len(data)} bytes, where {size} tokens of a llama2.c tokenizer take {at}")
    names = ["<unk>", "<s>", "</s>", *tokens[3:]]
    spaced = [name.replace(" ", "\u2581") for name in names]
    vocabulary = {name: number for number, name in reversed(list(enumerate(spaced)))}
    by_score = sorted(range(3, size), key=lambda number: -scores[number])
    merges = [
        (spaced[number][:cut], spaced[number][cut:])
        for number in by_score
        if not spaced[number].startswith("<0x")
        for cut in range(1, len(spaced[number]))
        if spaced[number][:cut] in vocabulary and spaced[number][cut:] in vocabulary
    ]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=context
    )
