"""Base of our transformers caches, whose KV data is in drives or in tiers.

A cache object of the user stays in use: its layers are replaced by ours, and it fills like any other cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache

from host_driver.hf.shape import UnsupportedModelError

C = TypeVar("C", bound="ExternalCache")


class NotCopyable:
    """Object whose data would not be copied with it. `where`, `where_to`: location of the data, for messages."""

    where, where_to = "in drives", "into drives"

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

    def replace_layers(self, given: Cache) -> None:
        """Replace the layers of a user's cache by these."""
        if given is not self:
            given.layers, given.csd_cache = self.layers, self


def own_layers(model: PreTrainedModel, given: Cache | None, layers: int, elsewhere: Sequence[int]) -> Sequence[Any]:
    """Layers of the cache that a model would create, if some of them stay with the model.

    Args:
        model: The model.
        given: The user's cache.
        layers: Number of layers.
        elsewhere: Indices of the layers that will be replaced.
    """
    if len(elsewhere) == layers:
        return elsewhere
    config = model.config.get_text_config(decoder=True)
    layers_of: Sequence[Any] = (given if isinstance(given, StaticCache) else DynamicCache(config=config)).layers
    return layers_of


def cache_for(given: Any, owner: object, make: Callable[[Cache | None], C]) -> C:
    """Our cache for the cache argument of a forward of the attached model.

    Args:
        given: Argument of the forward; None: no cache.
        owner: The current session.
        make: Creates the replacement cache.

    Raises:
        Unsupported: The cache is filled, belongs to another session, or has an unsupported type.
    """
    cache: Any = given if isinstance(given, ExternalCache) else getattr(given, "csd_cache", None)
    if cache is not None:
        if cache.owner is not owner:
            raise UnsupportedModelError(
                f"this cache is {cache.where} of another session, or of one that was closed: start a new cache"
            )
        found: C = cache
        return found
    own = make(given)
    if given is None:
        return own
    if type(given) not in (DynamicCache, StaticCache):
        kind = type(given).__name__
        raise UnsupportedModelError(f"a cache of type {kind} cannot move {own.where_to}: use DynamicCache()")
    if given.get_seq_length():
        raise UnsupportedModelError(
            f"a cache that was filled outside of vcsd.attach cannot move {own.where_to}: fill it inside"
        )
    return own
