"""A storage plug-in for LMCache: its chunks of K and V in drives.

    storage_plugins: [vcsd]
    extra_config:
      storage_plugin.vcsd.module_path: vcsd.integrations.lmcache
      storage_plugin.vcsd.class_name: VcsdBackend
      vcsd: {drives: [csd0, csd1]}

The keys of `vcsd`: `vcsd.integrations.settings.Settings`, but `block_tokens` and `admit_after`, which are LMCache's own
business. A chunk is a block without others before it, as LMCache names each by all the tokens up to its end. Its model
is identified by vLLM's configuration: LMCache knows only the model's name.
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
from host_driver.prefixes.identity import ModelIdentity
from host_driver.prefixes.keeper import Keeper, Rows, connected
from host_driver.prefixes.names import PrefixNames
from vcsd.integrations.model import identity_of
from vcsd.integrations.paged import shape_of
from vcsd.integrations.settings import Settings


class VcsdBackend(StoragePluginInterface):
    """Stores whole chunks; one that is not full, or of another form than K and V of all layers, is left to others."""

    def __init__(self, config: Any = None, metadata: Any = None, local_cpu_backend: Any = None, **others: Any) -> None:
        """Raises ValueError for a setting or a model that is not served, ConnectionError where no drive answers."""
        super().__init__(config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, **others)
        settings = from_values((config.extra_config or {}).get("vcsd"), Settings)
        drives = settings.share(metadata.worker_id, metadata.world_size)
        layers, parts, self._tokens, heads, values = metadata.kv_shape
        if metadata.use_mla or parts != 2:
            raise ValueError("a model without K and V of each token: no prefix of it is kept in drives")
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
        self._keeper, self._there = Keeper(store, settings.stores_in_flight), set[bytes]()

    def contains(self, key: Any, pin: bool = False) -> bool:
        for each, there in self._keeper.take_changes().items():
            (self._there.add if there else self._there.discard)(each)
        found = self._key(key) in self._there
        return found and (not pin or self.pin(key))

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Never: to store a chunk twice does no harm."""
        return False

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Chunks are copied here and stored later, or dropped where too many wait; nobody is told."""
        for key, each in zip(keys, objs, strict=True):
            if each.get_memory_format() == MemoryFormat.KV_2LTD and each.get_shape() == self._form:
                self._keeper.store([self._key(key)], partial(self._rows, each.tensor))

    def get_blocking(self, key: Any) -> Any:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[Any]:
        """All are asked for at once; None for what is not there any more."""
        return [self._object(each) for each in [self._keeper.load([self._key(key)]) for key in keys]]

    def pin(self, key: Any) -> bool:
        return self._keeper.pin([self._key(key)])

    def unpin(self, key: Any) -> bool:
        return self._keeper.unpin([self._key(key)])

    def remove(self, key: Any, force: bool = True) -> bool:
        return self._keeper.remove([self._key(key)]).result()

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        """What is loaded counts as used."""

    def close(self) -> None:
        self._keeper.close()

    def _key(self, key: Any) -> bytes:
        """LMCache's own key, but for the model's name: that depends on how its path is written."""
        return self._names.key_of(key.to_string().removeprefix(self._model_prefix).encode())

    def _rows(self, chunk: torch.Tensor) -> Rows:
        """Of a chunk (2, layers, tokens, heads x values), a copy."""
        s = self._names.shape
        bits = chunk.cpu().contiguous().view(torch.int16).numpy().view(np.float16)
        k, v = bits.reshape(2, s.layers, self._tokens, s.kv_heads, s.head_dim).copy()
        return k, v

    def _object(self, future: Future[Rows | None]) -> Any:
        """A chunk in LMCache's memory; None where it could not be loaded, or has no room there."""
        if (rows := future.result()) is None:
            return None
        made = self.local_cpu_backend.allocate(self._form, self._dtype, MemoryFormat.KV_2LTD)
        if made is not None:
            bits = np.stack(rows).reshape(2, *self._form[1:3], -1).view(np.int16)
            made.tensor.copy_(torch.from_numpy(bits).view(self._dtype))
        return made


def _identity(metadata: Any, settings: Settings) -> ModelIdentity:
    """The model of the engine that LMCache works for; raises ValueError if it cannot be known.

    LMCache says no more of a model than its name. vLLM's configuration is current while its workers begin.
    """
    engine = _vllm_config()
    if engine is None:
        if not settings.identity:
            raise ValueError(
                "vcsd: which model the KV cache is of is not known outside of a vLLM worker: "
                'set "identity" to words that change when the model does'
            )
        return ModelIdentity.of_words(f"{settings.identity}, {metadata.kv_dtype}")
    if engine.lora_config is not None:
        raise ValueError(
            "vcsd: LMCache's keys do not tell LoRA adapters apart: run without --enable-lora, or use VcsdConnector"
        )
    return identity_of(engine, settings, kv_dtype=str(metadata.kv_dtype))


def _vllm_config() -> Any:
    """The configuration of the vLLM worker that begins in this process; None if there is none."""
    current = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", None)
    return current() if current else None
