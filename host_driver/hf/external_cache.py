"""A cache of ours in a model of transformers: what those in drives and those in tiers have in common.

A user's own cache stays the user's: it gets our layers in place of its own, and so fills as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache

from host_driver.hf.shape import Unsupported

C = TypeVar("C", bound="OwnCache")


class Elsewhere:
    """What a copy of the host's objects would not copy. where: in words."""

    where, where_to = "in drives", "into drives"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Unsupported(f"K and V of this cache are {self.where}, and are not copied: feed the tokens to a new cache")


class OwnCache(Elsewhere, Cache):
    """A cache whose K and V lie elsewhere. owner: what an attach has made, by which its caches are known."""

    def __init__(self, layers: Sequence[CacheLayerMixin], owner: object) -> None:
        super().__init__(layers=list(layers))
        self.owner = owner
        self._in_forward = self._torn = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward of the attached model, the one time at which layers are filled; each must have been, by as much."""
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
            raise Unsupported(f"layers {', '.join(map(str, lacking))} cache no K and V: only attention is served")
        self._torn = False

    def end_forward(self) -> None:
        """The model's forward is over; raises where it left something out."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise Unsupported for what layers of ours do not do. Those of the model's own, as windows, that stand before
        may have done it already: then the cache is of no use."""
        self._torn |= any(not hasattr(layer, "where") for layer in self.layers)
        raise Unsupported(reason)

    def check_whole(self) -> None:
        """Raise Unsupported where a forward has failed."""
        if self._torn:
            raise Unsupported("a forward on this cache has failed half way: start a new one")

    def check_in_forward(self) -> None:
        """Raise Unsupported outside of a forward of the attached model."""
        if not self._in_forward:
            raise Unsupported(f"this cache's K and V are {self.where}: give it to the model that vcsd.attach was given")

    def stand_behind(self, given: Cache) -> None:
        """Let a user's cache have these layers in place of its own: it is filled with this one."""
        if given is not self:
            given.layers, given.csd_cache = self.layers, self


def own_layers(model: PreTrainedModel, given: Cache | None, layers: int, elsewhere: Sequence[int]) -> Sequence[Any]:
    """The layers of the cache that a model would have, where some of `layers` stay with it. given: the user's cache.
    elsewhere: numbers of those in whose place others will stand."""
    if len(elsewhere) == layers:
        return elsewhere
    config = model.config.get_text_config(decoder=True)
    layers_of: Sequence[Any] = (given if isinstance(given, StaticCache) else DynamicCache(config=config)).layers
    return layers_of


def behind(given: Any, owner: object, make: Callable[[Cache | None], C]) -> C:
    """The cache of ours that stands behind what a forward of the attached model was given.

    Raises Unsupported for a cache that is filled or of another attach, and for kinds that do something else than keep
    K and V.
    """
    cache: Any = given if isinstance(given, OwnCache) else getattr(given, "csd_cache", None)
    if cache is not None:
        if cache.owner is not owner:
            raise Unsupported(
                f"this cache is {cache.where} of another attach, or of one that has ended: start a new one"
            )
        found: C = cache
        return found
    own = make(given)
    if given is None:
        return own
    if type(given) not in (DynamicCache, StaticCache):
        kind = type(given).__name__
        raise Unsupported(f"a cache of type {kind} cannot move {own.where_to}: use DynamicCache()")
    if given.get_seq_length():
        raise Unsupported(f"a cache that was filled outside of vcsd.attach cannot move {own.where_to}: fill it inside")
    return own
