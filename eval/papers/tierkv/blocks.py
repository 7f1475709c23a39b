"""KV blocks: their bytes (equation 2), how long they take from a tier (equation 1), and what their size costs."""

from __future__ import annotations

from vcsd_eval.papers.profiles import Host, Model, Ssd

BLOCK_TOKENS = 16
FP16_BYTES = 2


def block_bytes(model: Model, tokens: int = BLOCK_TOKENS) -> int:
    """Size of the KV data of `tokens` tokens in all layers, bytes."""
    return 2 * model.layers * model.kv_heads * model.head_dim * tokens * FP16_BYTES


def from_dram_us(host: Host, size: float) -> float:
    """Time of a copy of `size` bytes from host memory to the GPU, us."""
    return host.gpu_link_us + size / (host.gpu_link_gb_per_s * 1e3)


def from_ssd_us(ssd: Ssd, size: float) -> float:
    """Time of a read of `size` bytes, us."""
    return ssd.random_read_us + size / (ssd.read_gb_per_s * 1e3)


def efficiency(host: Host, size: float) -> float:
    """The share of the link's rate that copies of this size get."""
    return 1 - host.gpu_link_us / from_dram_us(host, size)


def lost_share(tokens: int, mean_tokens: float) -> float:
    """Fraction of memory lost to half-empty last blocks of requests with `mean_tokens` tokens."""
    return tokens / 2 / (mean_tokens + tokens / 2)


def best_tokens(model: Model, host: Host, mean_tokens: float, sizes: tuple[int, ...]) -> int:
    """Block size with the smallest combined loss of memory and link rate."""
    return min(
        sizes,
        key=lambda tokens: lost_share(tokens, mean_tokens) + 1 - efficiency(host, block_bytes(model, tokens)),
    )
