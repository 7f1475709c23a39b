"""What serving engines write to an SSD, from their documentation."""

from __future__ import annotations

from dataclasses import dataclass

FILL = 0.9
"""Fraction of the drive that engines fill. Mooncake's local disk tier evicts from 90 % on by its default
(docs.gpustack.ai, KV Cache Local Disk Tier); assumed for the others, whose limit the user sets."""


@dataclass(frozen=True, slots=True)
class WritePattern:
    """An engine's objects. All of them evict the least recently used ones, and write prompts alone.

    Attributes:
        name: Name of the engine.
        object_tokens: Tokens of an object; prompts are stored as whole objects.
        per_layer: Each layer is an object of its own.
        source: Documentation of the pattern.
    """

    name: str
    object_tokens: int
    per_layer: bool
    source: str


PATTERNS = (
    WritePattern(
        "LMCache",
        256,
        False,
        "chunk_size 256, cache_policy LRU, save_decode_cache and save_unfull_chunk false by default: "
        "github.com/LMCache/LMCache, docs/source/api_reference/configurations.rst",
    ),
    WritePattern(
        "Mooncake",
        512,
        False,
        "blocks of 512 tokens: github.com/kvcache-ai/Mooncake, the trace's README; a file is an object: issue 578",
    ),
    WritePattern(
        "HiCache",
        64,
        False,
        "--page-size 64, pages of all layers with page_first: docs.sglang.io/advanced_features/hicache_best_practices",
    ),
    WritePattern(
        "vLLM",
        16,
        True,
        "blocks of 16 tokens (block_size of CacheConfig on CUDA), a tensor for each layer "
        "(CanonicalKVCacheRef): docs.vllm.ai, vllm.v1.kv_offload.base; that they go to an SSD as they are is assumed",
    ),
)
"""Deleting a file does not reach the drive unless the file system is mounted with `discard`, which ext4 and XFS are not
by default: without it, a drive learns of a deletion when the space is written again."""
