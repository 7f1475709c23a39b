"""llama.cpp on a model's own weights, through its Python package: a baseline of a decode step, if installed."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from csd_spec.arrays import F32
from host_driver.hf.cache_argument import forward_on

MOST_TOKENS = 8192  # its cache is filled by a prompt, which takes time with the square of that
CHUNK = 512  # tokens of a prompt that are handed over at once


@dataclass(frozen=True, slots=True)
class CacheKind:
    """fp16: of its cache, as drives have it; else fp32. flash: attention by its kernel that keeps no scores."""

    fp16: bool
    flash: bool = False

    def differs(self, dtype: torch.dtype) -> float:
        """From which difference on, of the largest logit, logits are not those of a model of that dtype."""
        return 0.05 if dtype is not torch.float32 else 0.02 if self.fp16 else 1e-4


KINDS = {
    "llama.cpp, fp32": CacheKind(fp16=False),
    "llama.cpp, fp16": CacheKind(fp16=True),
    "llama.cpp, fp16, flash": CacheKind(fp16=True, flash=True),
}


def kinds_of(dtype: torch.dtype) -> dict[str, CacheKind]:
    """What may be compared with a model: in 16 bits its cache has no 32."""
    return {name: kind for name, kind in KINDS.items() if kind.fp16 or dtype is torch.float32}


def installed() -> bool:
    """Whether its packages are there."""
    return all(map(find_spec, ("llama_cpp", "gguf")))


def missing(model: PreTrainedModel, tokens: int) -> str | None:
    """Reason why llama.cpp cannot run for this model, in one line; None if it can."""
    if not installed():
        return "needs llama-cpp-python and gguf: pip install 'vcsd[baselines]'"
    config = model.config
    is_plain = config.model_type == "llama" and config.rope_parameters["rope_type"] == "default"
    if not (is_plain and config.hidden_act == "silu"):
        return f"only Llama's weights are written in its format, these are {config.model_type}'s"
    if tokens > MOST_TOKENS:
        return f"a prompt fills its cache, which takes too long for more than {MOST_TOKENS:,} tokens"
    return None


def write(model: PreTrainedModel, path: Path) -> None:
    """A Llama's weights as GGUF: float32, or float16 for a model in 16 bits; norms and biases float32."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = np.float32 if model.dtype is torch.float32 else np.float16
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                tensor = _in_pairs(tensor, heads)
        kind = np.float32 if tensor.ndim == 1 else weights
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.float().numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in its order: channels that are rotated together lie side by side, not half a head apart."""
    paired: torch.Tensor = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return paired.contiguous()


class LlamaCpp:
    """A model, and a cache with room for `tokens` of each sequence. Raises OSError where it refuses one of them."""

    def __init__(self, model: PreTrainedModel, tokens: int, batch: int, threads: int, kind: CacheKind) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p())
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            write(model, file)
            self._model = llama_cpp.llama_model_load_from_file(
                str(file).encode(), llama_cpp.llama_model_default_params()
            )
        if not self._model:
            raise OSError("llama.cpp does not take the model")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = batch * (-(-tokens // 256) * 256), batch, False
        params.n_batch = params.n_ubatch = max(CHUNK, batch)
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16 if kind.fp16 else llama_cpp.GGML_TYPE_F32
        ways = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.flash_attn_type = ways[kind.flash]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            llama_cpp.llama_model_free(self._model)
            raise OSError("llama.cpp does not make a cache for that")
        self._chunk = params.n_batch
        self._batch = llama_cpp.llama_batch_init(self._chunk, 0, 1)
        self._vocabulary, self._lengths = model.config.vocab_size, [0] * batch

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, vocabulary) after further tokens (B, n) of each sequence."""
        rows = [
            (token, self._lengths[seq] + at, seq, at == ids.shape[1] - 1)
            for seq, tokens in enumerate(ids.tolist())
            for at, token in enumerate(tokens)
        ]
        self._lengths = [length + ids.shape[1] for length in self._lengths]
        parts = [self._decode(rows[begin : begin + self._chunk]) for begin in range(0, len(rows), self._chunk)]
        return torch.from_numpy(np.concatenate(parts))

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> F32:
        """Logits of the tokens that want them; rows: a token, its position, its sequence, whether it does."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, seq, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, seq
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise OSError(f"llama.cpp does not decode: {code}")
        shape = sum(row[3] for row in rows), self._vocabulary
        if not shape[0]:
            return np.zeros(shape, np.float32)
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape).copy()

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


def expected(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The model's own logits after a prompt, and after its last token as a decode step: (2, B, vocabulary)."""
    cache, parts = DynamicCache(), (ids[:, :-1], ids[:, -1:])
    outs = [forward_on(model, cache, input_ids=part, logits_to_keep=1)[0] for part in parts]
    return torch.stack([out.logits[:, -1].float() for out in outs])


def difference(rival: LlamaCpp, ids: torch.Tensor, logits: torch.Tensor) -> float:
    """Fill its cache by the same prompt; the largest difference from those logits, of the largest of them."""
    result = torch.stack([rival(part) for part in (ids[:, :-1], ids[:, -1:])])
    return float((result - logits).abs().max() / logits.abs().max())
