"""Attention shape of a model."""

from __future__ import annotations

from csd_spec.checked import Count, frozen_value

FP16_BYTES = 2


@frozen_value
class ModelShape:
    """Layers, heads and head size of a decoder, as a drive needs them.

    Attributes:
        latent: Whether V is a part of K, so that only K is stored.
        v_head_dim: Channels of V if fewer than K's; drives store zeros for the others.
    """

    name: str
    layers: Count
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    latent: bool = False
    v_head_dim: Count | None = None

    def __post_init__(self) -> None:
        if self.v_head_dim and self.v_head_dim > self.head_dim:
            raise ValueError(f"v_head_dim = {self.v_head_dim}: must be at most head_dim = {self.head_dim}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads = {self.q_heads}: must be a multiple of kv_heads = {self.kv_heads}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers and heads in FP16, as the model has them."""
        of_v = 0 if self.latent else self.v_head_dim or self.head_dim
        return self.layers * self.kv_heads * (self.head_dim + of_v) * FP16_BYTES
