"""The cache that a caller gives to an attached model: it stays in use, and its layers are replaced by ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from host_driver.hf.cache import KvCache
from host_driver.hf.shape import FULL, WINDOWS, UnsupportedModelError, decoder_layers
from host_driver.kv_table import KvTable


def own_layers(model: PreTrainedModel, cache: Cache | None, kinds: Sequence[str]) -> Sequence[Any]:
    """Layers of the cache of a forward, of which those with full attention will be replaced.

    They are the caller's own, which may have been told to record their past (assisted generation); without a cache,
    those that the model would create.

    Args:
        model: The model.
        cache: The user's cache.
        kinds: Kind of each layer.
    """
    config = model.config.get_text_config(decoder=True)
    # Fewer in the draft of an early exit
    kinds = kinds[: decoder_layers(config) or getattr(config, "num_hidden_layers", len(kinds))]
    if cache is not None and cache.layers:
        layers: Sequence[Any] = cache.layers
    elif cache is not None and cache.layer_class_to_replicate and set(kinds) <= {FULL, *WINDOWS}:
        layers = [cache.layer_class_to_replicate() for _ in kinds]
    elif set(kinds) == {FULL}:
        layers = kinds
    else:
        layers = DynamicCache(config=config).layers
    if len(layers) != len(kinds):
        raise UnsupportedModelError(f"a cache of {len(layers)} layers, and the model has {len(kinds)}")
    return layers


def cache_for(argument: Any, kv: KvTable, make: Callable[[Cache | None], KvCache]) -> KvCache:
    """Our cache for the cache argument of a forward of the attached model.

    Args:
        argument: Argument of the forward; None: no cache.
        kv: KV data of the current session.
        make: Creates the replacement cache.

    Raises:
        Unsupported: The cache is filled, belongs to another session, or has an unsupported type.
    """
    cache: Any = argument if isinstance(argument, KvCache) else getattr(argument, "csd_cache", None)
    if cache is not None:
        if cache.kv is not kv:
            raise UnsupportedModelError(
                f"this cache is {cache.where} of another session, or of one that was closed: start a new cache"
            )
        ours: KvCache = cache
        return ours
    if argument is None:
        return make(None)
    where_to = kv.where.replace("in ", "into ")
    if type(argument) not in (DynamicCache, StaticCache):
        kind = type(argument).__name__
        raise UnsupportedModelError(f"a cache of type {kind} cannot move {where_to}: use DynamicCache()")
    if argument.get_seq_length():
        raise UnsupportedModelError(
            f"a cache that was filled outside of vcsd.attach cannot move {where_to}: fill it inside"
        )
    return make(argument)
