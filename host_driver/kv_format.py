"""Byte format of a token's keys and values in one layer, the same in every tier: `KVFormat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from csd_spec import AttentionConfig, ModelShape
from csd_spec.codecs import Codec


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Format of a token in one layer: all keys by head, then all values by head, `row_bytes` bytes.

    Attributes:
        value_dtype: Dtype of a stored value.
        kv_heads: KV heads; 1 with latent attention.
        k_channels: Channels of a key; with latent attention those of the latent and of the rotary key.
        v_channels: Channels of a value; 0 with latent attention.
        latent: Whether a token's value is a part of its key, and only the key is stored.
        kept: Codec of the drives' layout if it rounds values; None: values are stored unchanged.
    """

    value_dtype: torch.dtype
    kv_heads: int
    k_channels: int
    v_channels: int
    latent: bool = False
    kept: Codec | None = None

    @classmethod
    def of(cls, shape: ModelShape, dtype: torch.dtype, attention: AttentionConfig | None = None) -> KVFormat:
        """Format of a model's keys and values.

        Args:
            shape: Attention shape of the model.
            dtype: The model's dtype; also that of stored values unless drives store them.
            attention: Attention in drives, with their layout; None without drives.
        """
        v_channels = 0 if shape.latent else shape.v_head_dim or shape.head_dim
        lossy_codec = None
        if attention is not None:
            codec = attention.kv_layout.rows
            dtype = torch.bfloat16 if codec.value == "bf16" else torch.float16
            lossy_codec = None if codec.exact else codec
        return cls(dtype, shape.kv_heads, shape.head_dim, v_channels, shape.latent, lossy_codec)

    @property
    def values(self) -> int:
        """Values of a token in a layer."""
        return self.kv_heads * (self.k_channels + self.v_channels)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in a layer."""
        return self.values * self.value_dtype.itemsize

    def split(self, rows: Any) -> tuple[Any, Any]:
        """Split rows into keys (tokens, kv_heads, k_channels) and values (tokens, kv_heads, v_channels), as views.

        Args:
            rows: Tensor or array of values; its size is a multiple of a row's.
        """
        k_values = self.kv_heads * self.k_channels
        rows = rows.reshape(-1, k_values + self.kv_heads * self.v_channels)
        k = rows[:, :k_values].reshape(len(rows), self.kv_heads, self.k_channels)
        return k, rows[:, k_values:].reshape(len(rows), self.kv_heads, self.v_channels)

    def rounded(self, states: torch.Tensor) -> torch.Tensor:
        """Round queries, keys or values (..., channels) to the stored dtype; raises ValueError beyond FP16's range."""
        rounded = states.to(self.value_dtype)
        if self.value_dtype is torch.float16 and states.dtype is not torch.float16 and not rounded.isfinite().all():
            largest = float(states.abs().max())
            raise ValueError(f"q, K or V has {largest:,.0f}, beyond FP16's 65,504: use kv_dtype='bf16'")
        return rounded

    def stored(self, states: torch.Tensor) -> torch.Tensor:
        """New keys or values (..., channels) as every tier stores them; raises ValueError beyond FP16's range."""
        rounded = self.rounded(states)
        if self.kept is None:
            return rounded
        bits = rounded.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        again = self.kept.decode(self.kept.encode(bits), bits.shape[-1])
        return torch.from_numpy(again.view(np.int16)).view(self.value_dtype).to(rounded.device)
