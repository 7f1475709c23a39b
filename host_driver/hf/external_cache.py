"""Base of our transformers caches and of their layers, whose KV data is in drives or in tiers.

A cache object of the user stays in use: its layers are replaced by ours, and it fills like any other cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache

from host_driver.exclusive import Exclusive
from host_driver.hf.shape import FULL, WINDOWS, UnsupportedModelError, decoder_layers

C = TypeVar("C", bound="ExternalCache")


class NotCopyable:
    """Object whose data would not be copied with it. `where`: location of the data, for messages."""

    where = "in drives"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedModelError(
            f"this cache's data is {self.where} and cannot be copied: feed the tokens to a new cache"
        )


class ExternalCache(NotCopyable, Cache):
    """A cache with KV data outside of the model. `owner` identifies the session that created it."""

    def __init__(self, layers: Sequence[CacheLayerMixin], owner: object) -> None:
        super().__init__(layers=list(layers))
        self.owner = owner
        self._in_forward = self._torn = False
        self._release: weakref.finalize[..., Any] | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward of the attached model; raises if an attached layer was not filled."""
        self.check_whole()
        self._in_forward = self._torn = True
        before = self.get_seq_length()
        try:
            yield
        finally:
            self._in_forward = False
        self.end_forward()
        lengths = {
            number: layer.get_seq_length() for number, layer in enumerate(self.layers) if hasattr(layer, "where")
        }
        if lacking := [number for number, length in lengths.items() if length == before]:
            names = ", ".join(map(str, lacking))
            raise UnsupportedModelError(f"layers {names} cache no keys and values: only attention layers are supported")
        self._torn = False

    def keep(self, access: Exclusive[Any], data: Any) -> None:
        """Own data, which is freed when this cache is closed or dropped."""
        self._release = weakref.finalize(self, access.drop, data)
        self._release.atexit = False

    def free(self) -> None:
        """Free the data, if there is any."""
        if self._release is not None:
            self._release()
        self._release = None

    def close(self) -> None:
        """Free the data; the cache may be filled again."""
        self.free()
        self._torn = False

    def crop_layer(self, layer: int, length: int) -> None:
        """Keep the first `length` positions of one of our layers."""
        raise NotImplementedError

    def end_forward(self) -> None:
        """Called at the end of the model's forward; raises if it left something out."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise Unsupported for an operation that our layers do not support.

        Layers of the model's own (sliding windows) may have executed it already; then the cache is unusable.
        """
        self._torn |= any(not hasattr(layer, "where") for layer in self.layers)
        raise UnsupportedModelError(reason)

    def check_whole(self) -> None:
        """Raise Unsupported if a forward on this cache has failed."""
        if self._torn:
            raise UnsupportedModelError("a forward on this cache has failed half way: start a new cache")

    def check_in_forward(self) -> None:
        """Raise Unsupported outside a forward of the attached model."""
        if not self._in_forward:
            raise UnsupportedModelError(
                f"the KV data of this cache is {self.where}: pass the cache to the model that vcsd.attach was given"
            )

    def replace_layers(self, cache: Cache) -> None:
        """Replace the layers of a user's cache by these."""
        if cache is not self:
            cache.layers, cache.csd_cache = self.layers, self


class ExternalLayer(NotCopyable, CacheLayerMixin, Generic[C]):
    """One layer of an `ExternalCache`: its length without its data.

    Attributes:
        index: Index among the model's layers.
        number: Index among our layers.
        length: Positions seen, including padding.
    """

    is_croppable = True

    def __init__(self, cache: C, index: int, number: int) -> None:
        super().__init__()
        self._cache, self.index, self.number, self.length = weakref.ref(cache), index, number, 0

    @property
    def cache(self) -> C:
        cache = self._cache()
        assert cache is not None, "a layer outlived its cache"
        return cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """No effect: the KV data is not the model's."""

    def prefetch(self) -> None:
        """No effect: the KV data is not the model's."""

    def reset(self) -> None:
        self.length = 0
        self.is_initialized = False
        self.cache.close()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number")
        self.cache.check_whole()
        if tokens_to_remove and self.is_initialized:
            self.length = max(0, self.length + tokens_to_remove)
            self.cache.crop_layer(self.number, self.length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        place = self.where.removeprefix("in ")
        self.cache.refuse(f"{place} do not copy sequences yet: repeat the prompt before the first forward")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.cache.refuse(
            f"{self.where.removeprefix('in ')} do not drop single sequences of a batch yet: start a new cache"
        )


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


def cache_for(argument: Any, owner: object, make: Callable[[Cache | None], C], where: str) -> C:
    """Our cache for the cache argument of a forward of the attached model.

    Args:
        argument: Argument of the forward; None: no cache.
        owner: The current session.
        make: Creates the replacement cache.
        where: Location of its data, for messages.

    Raises:
        Unsupported: The cache is filled, belongs to another session, or has an unsupported type.
    """
    cache: Any = argument if isinstance(argument, ExternalCache) else getattr(argument, "csd_cache", None)
    if cache is not None:
        if cache.owner is not owner:
            raise UnsupportedModelError(
                f"this cache is {cache.where} of another session, or of one that was closed: start a new cache"
            )
        ours: C = cache
        return ours
    if argument is None:
        return make(None)
    where_to = where.replace("in ", "into ")
    if type(argument) not in (DynamicCache, StaticCache):
        kind = type(argument).__name__
        raise UnsupportedModelError(f"a cache of type {kind} cannot move {where_to}: use DynamicCache()")
    if argument.get_seq_length():
        raise UnsupportedModelError(
            f"a cache that was filled outside of vcsd.attach cannot move {where_to}: fill it inside"
        )
    return make(argument)
