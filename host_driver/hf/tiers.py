"""A transformers cache with KV data in tiers, placed by a policy, and the model that fills it.

A layer's data is stored by token, (tokens, B, H, d), so that new tokens can be appended in any tier. It is loaded to
the model's device for the attention of that layer, which is the model's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from host_driver.hf.external_cache import ExternalCache, ExternalLayer, own_layers
from host_driver.hf.forward import AttachedForward, check_not_attached, with_forward
from host_driver.hf.shape import FULL, UnsupportedModelError
from host_driver.kv_table import KvTable, Shape
from kv_cache.block_table import BlockKey, PolicyError
from kv_cache.hardware import DEVICE

REORDERED_TOKENS = 64  # per chunk, to bound the memory of reordering


class TieredLayer(ExternalLayer["TieredCache"]):
    """One layer of a `TieredCache`."""

    where = "in tiers"

    def __init__(self, cache: TieredCache, index: int, number: int) -> None:
        super().__init__(cache, index, number)
        self._order: torch.Tensor | None = None  # pending reordering of rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[:3] != value_states.shape[:3] or key_states.dtype != value_states.dtype:
            raise UnsupportedModelError(
                f"layer {self.index} caches keys and values of different heads, which tiers do not support"
            )
        self.cache.open(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new k and v (B, H, new, d); returns all keys and values, (B, H, tokens, d) each, on the device."""
        cache = self.cache
        cache.check_in_forward()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache.check(key_states, value_states)
        new = key_states.shape[2]
        cache.enter_layer(self.number, new)
        keys, values = self._stored("k", key_states), self._stored("v", value_states)
        self._order = None
        self.length += new
        return keys, values

    def _stored(self, part: str, states: torch.Tensor) -> torch.Tensor:
        kv, block = self.cache.kv, BlockKey(self.cache.request, self.number, part)
        end = self.length + states.shape[2]
        rows = kv.device_rows(block, end)[..., : states.shape[3]]
        if self._order is not None:
            for at in range(0, self.length, REORDERED_TOKENS):
                part_rows = rows[at : min(at + REORDERED_TOKENS, self.length)]
                part_rows.copy_(part_rows.index_select(1, self._order))
            kv.rewrite(block)
        rows[self.length :] = states.detach().permute(2, 0, 1, 3)
        return rows.permute(1, 2, 0, 3)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder rows the next time the layer is on the device."""
        if self.is_initialized:
            index = beam_idx.to(self.cache.kv.device)
            self._order = index if self._order is None else self._order.index_select(0, index)


class TieredCache(ExternalCache):
    """A transformers cache with KV data in tiers. Dropping it frees the data.

    Attributes:
        layers: Layers of the model's own cache; those in tiers are replaced by `TieredLayer`.
    """

    where = "in tiers"

    def __init__(self, kv: KvTable, layers: Sequence[Any], in_tiers: Sequence[int]) -> None:
        if in_tiers[-1] >= len(layers):
            raise UnsupportedModelError(
                f"a forward of {len(layers)} layers (early exit): a policy of tiers moves the data of all: leave it out"
            )
        ours = {index: TieredLayer(self, index, number) for number, index in enumerate(in_tiers)}
        super().__init__([ours.get(index, layer) for index, layer in enumerate(layers)], kv)
        self.kv = kv
        self.request, self._runs = -1, False
        self._states: tuple[Any, ...] = ()

    def open(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Allocate a batch shaped like these keys and values, (B, H, new, ...), once for all layers.

        Both get the number of channels of the wider one.
        """
        if self._release is None:
            batch, heads, *channels, dtype = self._states = _shape_of(keys, values)
            self._shape = Shape((batch, heads, max(channels)), dtype)
            self._check_device(self.kv.tiers.max_tokens or 1)
            self.request = next(_numbers)
            self.kv.open(self.request, self._shape)
            self.keep(self.kv.access, self.request)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise Unsupported if keys and values, (B, H, new, ...), differ from the first ones in shape or dtype."""
        if keys.device != self.kv.device:
            raise UnsupportedModelError(f"keys are on {keys.device}, this session's tiers are for {self.kv.device}")
        states = _shape_of(keys, values)
        if states != self._states:
            was, is_now = ("{} x {} x {} and {} of {}".format(*shape) for shape in (self._states, states))
            raise UnsupportedModelError(
                f"this cache holds keys and values of {was} (sequences, heads, channels), and is given {is_now}"
            )

    def enter_layer(self, layer: int, new: int) -> None:
        """Called at a layer's attention with `new` tokens; returns when its KV data is on the device."""
        request, kv = self.request, self.kv
        if layer == 0:
            if self._runs:
                raise PolicyError("the model stores keys and values in layer 0 twice in a forward")
            self._check_device(kv.tokens(request) + new)
            kv.begin({request: new})
            self._runs = True
        elif not self._runs:
            raise PolicyError(f"the model's first attention in a forward is in layer {layer}: must be layer 0")
        attention = kv.enter_layer(layer)
        if attention.tiers != (DEVICE,):
            raise PolicyError(
                f"the policy attends at {', '.join(attention.tiers)}: without drives only the device can attend"
            )
        if attention.rows != (request,):
            raise PolicyError("the policy attends to no request of the batch: attend to all of them")
        if attention.method != "dense":
            raise PolicyError(f"the policy attends with method {attention.method!r}: in tiers only 'dense' works")

    def _check_device(self, tokens: int) -> None:
        """Raise PolicyError if one layer does not fit on the device: then no policy could attend it."""
        limit, need = self.kv.tiers.device, 2 * self._shape.row_bytes * tokens
        if limit is not None and need > limit:
            raise PolicyError(
                f"keys and values of one layer take {need:,} bytes at {tokens:,} tokens of {self._shape.rows[0]} "
                f"sequences, and the device has {limit:,}: raise its limit (TierLimits.device, --device-kv-mib)"
            )

    def crop_layer(self, layer: int, length: int) -> None:
        self.kv.crop(self.request, layer, length)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self.kv.access.hold():
            try:
                with super().forward():
                    yield
            except BaseException:
                self.kv.abandon()
                self.free()  # data of an incomplete forward is invalid
                raise
            finally:
                self._runs = False

    def end_forward(self) -> None:
        if self._runs:
            self.kv.finish()


_numbers = itertools.count()


def _shape_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, ...]:
    """Sequences, heads, channels of keys and values, and dtype."""
    return (*keys.shape[:2], keys.shape[3], values.shape[3], keys.dtype)


@contextmanager
def in_tiers(model: PreTrainedModel, kv: KvTable, kinds: Sequence[str]) -> Iterator[None]:
    """Keep a model's KV cache in tiers until the block ends, then restore the model.

    Args:
        model: The model.
        kv: KV data in tiers.
        kinds: Kind of each layer; layers without full attention keep the model's own cache.
    """
    check_not_attached(model)
    numbers = [number for number, kind in enumerate(kinds) if kind == FULL]

    def make(cache: Cache | None) -> TieredCache:
        return TieredCache(kv, own_layers(model, cache, kinds), numbers)

    def run(forward: Callable[..., Any], cache: TieredCache, arguments: dict[str, Any]) -> Any:
        if model.training:
            raise UnsupportedModelError(
                "a KV cache in tiers has no gradients (inference only): call model.eval() first"
            )
        if (mask := arguments.get("attention_mask")) is not None:
            arguments = arguments | {"attention_mask": _cut(mask, cache.get_seq_length())}
        return forward(**arguments)

    with with_forward(model, AttachedForward(model, model.forward, kv, make, run, "in tiers")):
        yield


def _cut(mask: Any, past: int) -> Any:
    """Cut a static cache's mask, (B, 1, new, size), to the stored tokens; other masks are unchanged."""
    if isinstance(mask, dict):
        return {kind: _cut(layer_mask, past) if kind == FULL else layer_mask for kind, layer_mask in mask.items()}
    return mask[..., : past + mask.shape[2]] if isinstance(mask, torch.Tensor) and mask.dim() == 4 else mask
