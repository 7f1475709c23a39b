"""Hugging Face transformers: a cache whose K and V live in drives, and the attention that goes with it.

A model calls `cache.update(k, v)` and then the attention function with what update returned. Update returns the new
k and v only; the key tensor carries a `Handle`, by which the attention function finds the layer that it belongs to.

- Empty cache (prefill): attention runs on the model's device; k and v are shipped behind it.
- One new token: q, k and v go to the drives, the attention output comes back.
- Several new tokens on a cache that holds some: K and V of that one layer are read back and attention runs on the
  model's device, as in prefill. The drive's engine is sized for decode, and many queries share each byte that comes
  back, so this costs one pass over the layer instead of one per query.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from csd_spec import ModelShape
from host_driver.driver import Batch, Driver, Lane
from host_driver.hf.staging import stage

IMPLEMENTATION = "csd"
_UNSERVED = ("softcap", "s_aux", "position_bias", "sliding_window")


class Unsupported(ValueError):
    """Something that attention in drives cannot serve, with the reason."""


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The attention shape of a decoder; raises Unsupported, with the reason, for what drives cannot serve."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{name} is an encoder-decoder: only decoders are served")
    if not model._supports_sdpa or not model._can_set_attn_implementation():
        raise Unsupported(f"{name} does not let its attention be replaced (it has no AttentionInterface with sdpa)")
    sliding = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"]
    if other := sorted(set(kinds) - {"full_attention"}):
        raise Unsupported(f"{name} has layers of kind {', '.join(other)}: only full attention is served")
    q_heads = config.num_attention_heads
    return ModelShape(
        name=getattr(config, "name_or_path", "") or name,
        layers=config.num_hidden_layers,
        q_heads=q_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or q_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // q_heads,
    )


class CsdLayer(CacheLayerMixin):
    """One layer of a `CsdCache`: knows how much is stored, holds none of it."""

    is_croppable = True

    def __init__(self, cache: CsdCache, index: int) -> None:
        super().__init__()
        self._cache, self.index = weakref.ref(cache), index
        self.length = 0  # positions seen, padding included

    @property
    def cache(self) -> CsdCache:
        cache = self._cache()
        assert cache is not None, "a layer outlived its cache"
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = self.cache.driver.shape
        for name, states in (("key", key_states), ("value", value_states)):
            if states.shape[1] != shape.kv_heads or states.shape[3] != shape.head_dim:
                raise Unsupported(
                    f"layer {self.index} caches {name}s of {states.shape[1]} heads x {states.shape[3]} channels; "
                    f"drives serve {shape.kv_heads} x {shape.head_dim}, the same for K and V in every layer"
                )
        self.cache.open(key_states.shape[0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.check_use(self.index)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = key_states.view(key_states.shape)  # an object of its own, so that nobody else's tensor is marked
        keys.csd_handle = self.cache.pending = Handle(self.cache, self)  # type: ignore[attr-defined]
        return keys, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """K and V already are away from the model's device."""

    def prefetch(self) -> None:
        """K and V are attended where they lie."""

    def reset(self) -> None:
        self.length = 0
        self.is_initialized = False
        self.cache.close()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if tokens_to_remove and self.is_initialized:
            self.length = max(0, self.length + tokens_to_remove)
            self.cache.crop_layer(self.index, self.length)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise Unsupported("beam search moves sequences between rows, which drives do not do yet: use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise Unsupported("drives do not copy sequences yet: repeat the prompt before the first forward")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise Unsupported("drives do not drop single sequences of a batch yet: start a new cache")


class CsdCache(Cache):
    """A transformers cache whose K and V live in drives. Dropping it frees them.

    valid (B, positions) says which positions are stored: padding never is.
    """

    def __init__(self, driver: Driver, config: Any, max_tokens: int) -> None:
        super().__init__(layers=[CsdLayer(self, index) for index in range(driver.shape.layers)])
        self.driver, self.config, self.max_tokens = driver, config, max_tokens
        self.batch: Batch | None = None
        self.rows = slice(None)
        self.lane: Lane | None = None
        self.valid: NDArray[np.bool_] = np.zeros((0, 0), bool)
        self.pending: Handle | None = None
        self._seen: tuple[torch.Tensor | None, NDArray[np.bool_]] | None = None
        self._release: weakref.finalize | None = None  # type: ignore[type-arg]

    def open(self, count: int) -> None:
        """Create the sequences, once for all layers."""
        if self.batch is None:
            self.batch = self.driver.create(count, self.max_tokens)
            self.valid = np.zeros((count, 0), bool)
            self._release = weakref.finalize(self, self.driver.free, self.batch)
            self._release.atexit = False

    def close(self) -> None:
        """Free the sequences."""
        if self._release is not None:
            self._release()
        self.batch = self._release = self.pending = None

    def crop_layer(self, layer: int, length: int) -> None:
        """Keep the first `length` positions of one layer."""
        assert self.batch is not None
        self.driver.crop(self.batch, layer, self.valid[:, :length].sum(axis=1).astype(np.int64))
        if all(each.get_seq_length() == length for each in self.layers):
            self.valid = self.valid[:, :length]

    def check_use(self, layer: int) -> None:
        """Raise where the attention that follows is not ours, or where ours was not called last time."""
        implementation = self.config._attn_implementation
        if implementation != IMPLEMENTATION:
            raise Unsupported(
                f"this cache's K and V are in drives, and the model now uses attention {implementation!r}: "
                "use the cache inside vcsd.attach"
            )
        if self.pending is not None:
            raise Unsupported(f"the model did not pass the cached keys on to its attention (before layer {layer})")

    def mini_batch(self, rows: slice, lane: Lane) -> CsdCache:
        """The same sequences seen through `rows`, for one mini-batch of one decode step."""
        part = CsdCache(self.driver, self.config, self.max_tokens)
        part.batch, part.rows, part.lane, part.valid = self.batch, rows, lane, self.valid[rows]
        for mine, theirs in zip(self.layers, part.layers, strict=True):
            theirs.length, theirs.is_initialized = mine.length, True
        return part

    def merge(self, parts: list[CsdCache]) -> None:
        """Take over what the mini-batches of a step have stored."""
        self.valid = np.concatenate([part.valid for part in parts])
        for mine, theirs in zip(self.layers, parts[0].layers, strict=True):
            mine.length = theirs.length

    def admit(self, mask: torch.Tensor | None, batch: int, past: int, new: int) -> NDArray[np.bool_]:
        """Which of the `new` positions after `past` are tokens and not padding, (batch, new).

        The last query of a causal mask sees every token and no padding.
        """
        if self._seen is None or self._seen[0] is not mask or self._seen[1].shape[1] != past + new:
            if mask is None:
                row = np.concatenate([self.valid[:, :past], np.ones((batch, new), bool)], axis=1)
            else:
                if mask.dtype != torch.bool:
                    raise Unsupported(f"an attention mask of {mask.dtype}: only padding masks are served")
                row = mask[:, 0, -1].expand(batch, past + new).to("cpu", torch.bool).numpy()
            self._seen = mask, row
        row = self._seen[1]
        if not np.array_equal(row[:, :past], self.valid[:, :past]):
            raise Unsupported("the attention mask hides or shows earlier tokens that it did not before")
        self.valid = row
        return row[:, past:]

    def forget_mask(self) -> None:
        """The forward is over; the next one brings a mask of its own."""
        self._seen = None


class Handle:
    """Carried by the key tensor from `update` to the attention function."""

    def __init__(self, cache: CsdCache, layer: CsdLayer) -> None:
        self.cache, self.layer = cache, layer

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attention output (B, new tokens, q_heads, d); the new k and v end up in the drives."""
        cache, layer, (batch, _, new, _) = self.cache, self.layer, key.shape
        cache.pending = None
        past = layer.length
        admitted = cache.admit(mask, batch, past, new)
        if past and new == 1:
            out = self._decode(query, key, value, scaling, admitted[:, 0])
        else:
            keys, values = self._read_back(key, value, past) if past else (key, value)
            out, _ = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)
            self._ship(key, value, admitted)
        layer.length = past + new
        if layer.index == len(cache.layers) - 1:
            cache.forget_mask()
        return out

    def _decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        admitted: NDArray[np.bool_],
    ) -> torch.Tensor:
        """One token a sequence; a row of padding is not stored and attends to nothing."""
        cache, d = self.cache, query.shape[-1]
        assert cache.batch is not None
        if cache.lane is None:
            raise Unsupported("this forward did not go through the model that vcsd.attach was given")
        # Drives divide by sqrt(d); models with another scale get it through q
        q = query[:, :, 0] * (1.0 if scaling is None else scaling * d**0.5)
        q16, k16, v16 = stage(q, key[:, :, 0], value[:, :, 0])()
        rows: Any = cache.rows
        if not admitted.all():
            first = rows.start or 0
            rows = first + np.flatnonzero(admitted)
            q16, k16, v16 = q16[admitted], k16[admitted], v16[admitted]
        out = np.zeros((query.shape[0], query.shape[1], d), np.float16)
        if admitted.any():
            out[admitted] = cache.driver.decode(cache.batch, rows, cache.lane, self.layer.index, q16, k16, v16)
        return torch.from_numpy(out).to(query.device, query.dtype).unsqueeze(1)

    def _ship(self, key: torch.Tensor, value: torch.Tensor, admitted: NDArray[np.bool_]) -> None:
        assert self.cache.batch is not None
        staged = stage(key, value)

        def load() -> tuple[Any, Any]:
            k, v = (array.transpose(0, 2, 1, 3)[admitted] for array in staged())
            return k, v

        lengths = admitted.sum(axis=1).astype(np.int64)
        self.cache.driver.append(self.cache.batch, self.cache.rows, self.layer.index, lengths, load)

    def _read_back(self, key: torch.Tensor, value: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of this layer with the new ones behind, (B, kv_heads, past + new, d); padding reads as zero."""
        cache = self.cache
        assert cache.batch is not None
        stored = cache.driver.read(cache.batch, cache.rows, self.layer.index)
        valid = cache.valid[:, :past]
        whole = []
        for rows, new in zip(stored, (key, value), strict=True):
            old = np.zeros((*valid.shape, *rows.shape[1:]), np.float16)
            old[valid] = rows
            before = torch.from_numpy(old).to(new.device, new.dtype).transpose(1, 2)
            whole.append(torch.cat([before, new], dim=2))
        return whole[0], whole[1]


def csd_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The AttentionInterface function: keys that carry a handle are attended in drives, others by sdpa."""
    handle: Handle | None = getattr(key, "csd_handle", None)
    if handle is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise Unsupported(f"{type(module).__name__} attends with {name}, which drives do not do")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise Unsupported(f"{type(module).__name__} attends to later tokens, which drives do not do")
    if module.training:
        raise Unsupported("attention in drives is for inference, gradients do not pass it: call model.eval() first")
    return handle.attend(module, query, key, value, attention_mask, scaling), None


AttentionInterface.register(IMPLEMENTATION, csd_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
