"""LMCache storage plug-in: chunks of KV data in drives.

    storage_plugins: [vcsd]
    extra_config:
      storage_plugin.vcsd.module_path: vcsd.integrations.lmcache
      storage_plugin.vcsd.class_name: VcsdBackend
      vcsd: {drives: [csd0, csd1]}

The keys of `vcsd` are those of `vcsd.integrations.settings.Settings` except `block_tokens` and `admit_after`, which
LMCache decides. A chunk is stored as a block without predecessors, since LMCache's key covers all tokens up to its end.
The model is identified by vLLM's configuration, because LMCache knows only its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from csd_spec.checked import from_values
from csd_spec.model import FP16_BYTES
from host_driver.prefixes.async_store import AsyncPrefixStore, Rows, connected
from host_driver.prefixes.cache_keys import PrefixNames
from host_driver.prefixes.identity import ModelIdentity
from vcsd.integrations.model import identity_of
from vcsd.integrations.paged import shape_of
from vcsd.integrations.settings import Settings


class VcsdBackend(StoragePluginInterface):
    """Stores full chunks of keys and values of all layers; other chunks are ignored."""

    def __init__(self, config: Any = None, metadata: Any = None, local_cpu_backend: Any = None, **others: Any) -> None:
        """Raises ValueError for an unsupported setting or model, ConnectionError if no drive answers."""
        super().__init__(config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, **others)
        settings = from_values((config.extra_config or {}).get("vcsd"), Settings)
        drives = settings.share(metadata.worker_id, metadata.world_size)
        layers, parts, self._tokens, heads, values = metadata.kv_shape
        if metadata.use_mla or parts != 2:
            raise ValueError("the model has no keys and values per token (MLA): LMCache chunks of it are not supported")
        self._form = torch.Size((2, layers, self._tokens, heads * values))
        self._dtype = metadata.kv_dtype
        self._names = PrefixNames(
            shape=shape_of(layers, heads, values * self._dtype.itemsize // FP16_BYTES),
            model=_identity(metadata, settings),
            drives=len(drives),
            rank=metadata.worker_id,
            salt=settings.salt,
            seed=settings.seed,
            block_tokens=self._tokens,
        )
        self._model_prefix = f"{metadata.model_name}@"
        connects = settings.connects(metadata.worker_id, metadata.world_size)
        store = partial(connected, connects, self._names, settings.max_blocks or None)
        self._keeper, self._there = AsyncPrefixStore(store, settings.stores_in_flight), set[bytes]()

    def contains(self, key: Any, pin: bool = False) -> bool:
        for stored_key, there in self._keeper.take_changes().items():
            (self._there.add if there else self._there.discard)(stored_key)
        present = self._key(key) in self._there
        return present and (not pin or self.pin(key))

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Always False: storing a chunk twice is harmless."""
        return False

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Chunks are copied here and stored later; they are dropped without notice if the queue is full."""
        for key, obj in zip(keys, objs, strict=True):
            if obj.get_memory_format() == MemoryFormat.KV_2LTD and obj.get_shape() == self._form:
                self._keeper.store([self._key(key)], partial(self._rows, obj.tensor))

    def get_blocking(self, key: Any) -> Any:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[Any]:
        """Load all chunks concurrently; None for those no longer stored."""
        return [self._memory_object(future) for future in [self._keeper.load([self._key(key)]) for key in keys]]

    def pin(self, key: Any) -> bool:
        return self._keeper.pin([self._key(key)])

    def unpin(self, key: Any) -> bool:
        return self._keeper.unpin([self._key(key)])

    def remove(self, key: Any, force: bool = True) -> bool:
        return self._keeper.remove([self._key(key)]).result()

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        """No effect: loading marks a chunk as used."""

    def close(self) -> None:
        self._keeper.close()

    def _key(self, key: Any) -> bytes:
        """LMCache's key without the model's name, which depends on the spelling of its path."""
        return self._names.key_of(key.to_string().removeprefix(self._model_prefix).encode())

    def _rows(self, chunk: torch.Tensor) -> Rows:
        """Copy of a chunk (2, layers, tokens, heads x values)."""
        s = self._names.shape
        bits = chunk.cpu().contiguous().view(torch.int16).numpy().view(np.float16)
        k, v = bits.reshape(2, s.layers, self._tokens, s.kv_heads, s.head_dim).copy()
        return k, v

    def _memory_object(self, future: Future[Rows | None]) -> Any:
        """Chunk in LMCache's memory; None if it could not be loaded or allocated."""
        if (rows := future.result()) is None:
            return None
        chunk = self.local_cpu_backend.allocate(self._form, self._dtype, MemoryFormat.KV_2LTD)
        if chunk is not None:
            bits = np.stack(rows).reshape(2, *self._form[1:3], -1).view(np.int16)
            chunk.tensor.copy_(torch.from_numpy(bits).view(self._dtype))
        return chunk


def _identity(metadata: Any, settings: Settings) -> ModelIdentity:
    """Identity of the engine's model; raises ValueError if it is unknown.

    LMCache knows only a model's name. vLLM's configuration is available while its workers start.
    """
    engine = _vllm_config()
    if engine is None:
        if not settings.identity:
            raise ValueError(
                "vcsd: the model of the KV cache is unknown outside of a vLLM worker: "
                'set "identity" to words that change when the model does'
            )
        return ModelIdentity.from_text(f"{settings.identity}, {metadata.kv_dtype}")
    if engine.lora_config is not None:
        raise ValueError(
            "vcsd: LMCache's keys do not tell LoRA adapters apart: run without --enable-lora, or use VcsdConnector"
        )
    return identity_of(engine, settings, kv_dtype=str(metadata.kv_dtype))


def _vllm_config() -> Any:
    """Configuration of the vLLM worker that starts in this process; None if there is none."""
    current = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", None)
    return current() if current else None
