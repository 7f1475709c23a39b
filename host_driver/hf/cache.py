"""The transformers cache with KV data in a `KvTable`: in tiers or drives. Layers of other kinds keep their own cache.

A model calls `cache.update(k, v)` and then its attention with the result. Without drives, update stores the new k and v
and returns those of all tokens on the model's device, for the model's own attention. With drives, and for requests of
a server, it returns only the new ones; the key tensor carries its `KvLayer` to `host_driver.hf.attention`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from host_driver.batch import MicroBatch
from host_driver.hf.latent import MARK, Latent
from host_driver.hf.shape import UnsupportedModelError
from host_driver.kv_format import KVFormat
from host_driver.kv_table import KvTable
from kv_cache.block_table import BlockKey, PolicyError
from kv_cache.hardware import DEVICE

IMPLEMENTATION = "csd"
REORDERED_TOKENS = 64  # per chunk, to bound the memory of reordering

_numbers = itertools.count()


class NotCopyable:
    """Object whose data would not be copied with it. `where`: location of the data, for messages."""

    where: str

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedModelError(
            f"this cache's data is {self.where} and cannot be copied: feed the tokens to a new cache"
        )


class KvLayer(NotCopyable, CacheLayerMixin):
    """One layer of a `KvCache`: its length without its data.

    Attributes:
        index: Index among the model's layers.
        number: Index among the layers in the table, or among the windows of requests of a server.
        window: Length of the sliding window of requests of a server, tokens; 0: full attention.
        length: Positions seen, including padding.
    """

    is_croppable = True

    def __init__(self, cache: KvCache, index: int, number: int, window: int = 0) -> None:
        super().__init__()
        self._cache, self.where = weakref.ref(cache), cache.where
        self.index, self.number, self.window, self.length = index, number, window, 0
        self._order: torch.Tensor | None = None  # pending reordering of rows

    @property
    def cache(self) -> KvCache:
        cache = self._cache()
        assert cache is not None, "a layer outlived its cache"
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.cache.open(self, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.cache
        cache.check_use(self.number)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not cache.attends:
            return self._on_device(key_states, value_states)
        keys = key_states.view(key_states.shape)  # a new tensor object, so that no other reference is marked
        setattr(keys, MARK, self)
        cache.pending = self
        return keys, value_states

    def _on_device(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new k and v (B, H, new, ...); returns those of all tokens, (B, H, tokens, ...) each."""
        cache = self.cache
        cache.enter_own_attention(self, keys, values)
        rows = [cache.kv.stored(block) for block in self._blocks()]
        if self._order is not None:
            self._reorder(rows, self._order)
            self._order = None
        for row, parts in enumerate(rows):
            for stored, states in zip(parts, (keys, values), strict=True):
                stored[self.length :] = states[row].detach().transpose(0, 1)
        self.length += keys.shape[2]
        k, v = (_stacked([part.transpose(0, 1) for part in parts]) for parts in zip(*rows, strict=True))
        return k, v

    def _blocks(self) -> list[BlockKey]:
        """The block of each row, which is kept in one."""
        return [BlockKey(request, self.number, self.cache.kv.part) for request in self.cache.requests]

    def _reorder(self, rows: list[tuple[torch.Tensor, torch.Tensor]], order: torch.Tensor) -> None:
        """Give each row the stored tokens of another."""
        for states in zip(*rows, strict=True):
            for at in range(0, self.length, REORDERED_TOKENS):
                tokens = slice(at, min(at + REORDERED_TOKENS, self.length))
                before = torch.stack([row[tokens] for row in states])
                for row, source in zip(states, order.tolist(), strict=True):
                    row[tokens] = before[source]
        for block in self._blocks():
            self.cache.kv.rewrite(block)

    def latent_space(self, module: torch.nn.Module, rows: torch.Tensor) -> Latent | None:
        """Conversion of a layer with latent attention, created once; None for other layers."""
        latents = self.cache.latents
        if module not in latents:
            latents[module] = Latent(module, rows) if hasattr(module, "expand_kv") else None
        return latents[module]

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
        self._order = None
        self.cache.close()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number")
        self.cache.check_whole()
        if tokens_to_remove and self.is_initialized:
            self.length = max(0, self.length + tokens_to_remove)
            self.cache.crop_layer(self.number, self.length)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder rows the next time the layer is on the device."""
        if self.cache.attends:
            self.cache.refuse("beam search moves sequences between rows, which drives do not support: use num_beams=1")
        if self.is_initialized:
            index = beam_idx.to(self.cache.kv.device)
            self._order = index if self._order is None else self._order.index_select(0, index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        place = self.where.removeprefix("in ")
        self.cache.refuse(f"{place} do not copy sequences yet: repeat the prompt before the first forward")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.cache.refuse(
            f"{self.where.removeprefix('in ')} do not drop single sequences of a batch yet: start a new cache"
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that attend in a forward, the same in every layer.

    Attributes:
        cache: Their cache.
        past: Positions before the forward.
        mask: Mask (B or 1, 1, new, positions), True where a query sees a token; None: causal.
        requests: Those that have new tokens.
        new: Which new positions are tokens rather than padding, (B, new) bool.
        whole: Whether all are.
        numbers: Row of each request in the batch.
    """

    cache: KvCache
    past: int
    mask: torch.Tensor | None
    requests: list[Hashable]
    new: NDArray[np.bool_]
    whole: bool
    numbers: dict[Hashable, int]

    def are_of(self, past: int, new: int, mask: torch.Tensor | None) -> bool:
        """Whether a layer with `new` positions after `past`, and this mask, has these rows."""
        return (self.past, self.new.shape[1]) == (past, new) and self.mask is mask

    def tokens(self, states: torch.Tensor, request: Hashable) -> torch.Tensor:
        """New tokens of a request, (heads, tokens, channels), from states (B, heads, new, channels)."""
        row = states[self.numbers[request]]
        return row if self.whole else row[:, self.positions(request).to(row.device)]

    def positions(self, request: Hashable) -> torch.Tensor:
        """Which new positions of a request are tokens, (new,) bool."""
        return torch.from_numpy(self.new[self.numbers[request]])

    def stored(self, request: Hashable, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values of a request, (tokens, kv_heads, channels) each, as every tier stores them."""
        k, v = (self.tokens(states, request).transpose(0, 1) for states in (key, value))
        kv_format = self.cache.kv.format
        return kv_format.stored(k), kv_format.stored(v[..., : kv_format.v_channels])

    def mask_of(self, request: Hashable) -> torch.Tensor | None:
        """Mask of a request's new tokens over its stored ones, (1, 1, new, tokens); None: causal."""
        if self.mask is None or self.cache.ragged:
            return None
        row = self.numbers[request]
        of_row = self.mask[min(row, len(self.mask) - 1), 0]  # a mask of one row is that of all
        of_row = of_row[self.positions(request).to(of_row.device)]
        return of_row[:, torch.from_numpy(self.cache.valid[row]).to(of_row.device)][None, None]


class KvCache(NotCopyable, Cache):
    """A transformers cache with KV data in a table. Dropping it frees the data.

    Attributes:
        kv: The KV data of the session.
        attends: Whether `host_driver.hf.attention` attends; otherwise the model does, to all keys and values.
        requests: The request of each row, in the table.
        valid: Which positions are stored, (B, positions) bool; padding is not. Only used if `attends`.
        pending: The layer whose keys were returned by `update` and not attended yet.
        micro_batch: Part of a decode step in drives that runs now.
        rows: The rows of this forward, once its first layer is attended.
        latents: Latent conversions by attention module.
    """

    ragged = False  # whether rows have different lengths and no padding

    def __init__(self, kv: KvTable, config: Any, layers: Sequence[Any], placed: Sequence[int]) -> None:
        """Create an empty cache.

        Args:
            kv: The KV data of the session.
            config: The model's.
            layers: Layers of the model's own cache; those in the table are replaced.
            placed: Indices of the layers in the table.
        """
        self.kv, self.where, self.config, self.placed = kv, kv.where, config, placed
        ours = {index: KvLayer(self, index, number) for number, index in enumerate(placed)}
        super().__init__(layers=[ours.get(index, layer) for index, layer in enumerate(layers)])
        if kv.drives is None and placed[-1] >= len(layers):
            raise UnsupportedModelError(
                f"a forward of {len(layers)} layers (early exit): a policy of tiers moves the data of all: leave it out"
            )
        self.attends = kv.drives is not None
        self.requests: list[Hashable] = []
        self.valid: NDArray[np.bool_] = np.zeros((0, 0), bool)
        self.pending: KvLayer | None = None
        self.micro_batch: MicroBatch | None = None
        self.rows: Rows | None = None
        self.latents: dict[torch.nn.Module, Latent | None] = {}
        self._in_forward = self._torn = self._runs = False
        self._format: KVFormat | None = None
        self._release: weakref.finalize[..., Any] | None = None

    def open(self, layer: KvLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Check the shape of a layer's first keys and values, (B, H, new, ...); create the requests of all layers."""
        if self.attends:
            self._check_shape(layer, keys, values)
        elif keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise UnsupportedModelError(
                f"layer {layer.index} caches keys and values of different heads, which tiers do not support"
            )
        if self.requests:
            return
        if not self.attends:
            self._format = _format_of(keys, values)
            self._check_device(self.kv.tiers.max_tokens or 1, len(keys))
        self.create(len(keys))

    def create(self, count: int) -> None:
        """Create the requests of `count` rows."""
        assert not self.requests, "the rows of a cache are created once"
        number = next(_numbers)
        requests: list[Hashable] = [(number, row) for row in range(count)]
        self.kv.open(requests, self._format)  # first: a drive lost meanwhile recomputes caches that have requests
        self.requests, self.valid = requests, np.zeros((count, 0), bool)
        self._release = weakref.finalize(self, self.kv.access.drop, tuple(self.requests))
        self._release.atexit = False

    def _check_shape(self, layer: KvLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.kv.drives
        shape = self.kv.drives.driver.shape
        if shape.latent and (keys.shape[1], keys.shape[3] + values.shape[3]) == (1, shape.head_dim):
            return
        of_v = shape.v_head_dim or shape.head_dim
        for name, states, channels in (("key", keys, shape.head_dim), ("value", values, of_v)):
            if states.shape[1] != shape.kv_heads or states.shape[3] != channels:
                raise UnsupportedModelError(
                    f"layer {layer.index} caches {name}s of {states.shape[1]} heads x {states.shape[3]} channels; "
                    f"drives serve {shape.kv_heads} x {channels}, the same in every layer"
                )

    @property
    def own_layers(self) -> list[KvLayer]:
        """Layers in the table."""
        return [layer for layer in self.layers if isinstance(layer, KvLayer)]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward of the attached model; raises if an attached layer was not filled."""
        with self.kv.access.hold():
            self.check_whole()
            self._in_forward = self._torn = True
            before = self.get_seq_length()
            try:
                yield
                self._end_forward(before)
            except BaseException:
                self.kv.abandon()
                self._free()  # data of an incomplete forward is invalid
                raise
            finally:
                self._in_forward = self._runs = False
                self.rows = self.pending = None
            self._torn = False

    def _end_forward(self, before: int) -> None:
        """Raise if the forward, which began with `before` positions, left something out."""
        self._check_attended()
        self.finish(before)
        lengths = {layer.index: layer.length for layer in self.own_layers}
        if lacking := [number for number, length in lengths.items() if length == before]:
            names = ", ".join(map(str, lacking))
            raise UnsupportedModelError(f"layers {names} cache no keys and values: only attention layers are supported")

    def finish(self, past: int) -> None:
        """End the iteration of a forward, which began with `past` positions; no effect if it has ended."""
        if self._runs:
            self._runs = False
            self.kv.finish()
            if self.kv.only_drives:  # only now are the tokens of all micro-batches known
                self.kv.store_in_drives(self._new_tokens(past), range(len(self.own_layers)))

    def _new_tokens(self, past: int) -> dict[Hashable, int]:
        """Tokens of each request after the first `past` positions, of those that have any."""
        counts = self.valid[:, past:].sum(axis=1).tolist()
        return {request: count for request, count in zip(self.requests, counts, strict=True) if count}

    def begin(self, requests: Mapping[Hashable, int]) -> None:
        """Called at the first layer's attention with the new tokens of each request: start an iteration."""
        if not self._runs and requests:
            if self.kv.only_drives:
                self.kv.stay_in_drives()
            else:
                self.kv.begin(requests)
        self._runs |= bool(requests)

    def enter_own_attention(self, layer: KvLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Called at a layer's attention by the model to new k and v; returns when the layer is on the device."""
        self._check_states(keys, values)
        if layer.number == 0:
            if self._runs:
                raise PolicyError("the model stores keys and values in layer 0 twice in a forward")
            self._check_device(layer.length + keys.shape[2], len(keys))
            self.begin(dict.fromkeys(self.requests, keys.shape[2]))
        elif not self._runs:
            raise PolicyError(f"the model's first attention in a forward is in layer {layer.number}: must be layer 0")
        attention = self.kv.enter_layer(layer.number)
        if attention.tiers != (DEVICE,):
            raise PolicyError(
                f"the policy attends at {', '.join(attention.tiers)}: without drives only the device can attend"
            )
        if set(attention.rows) != set(self.requests):
            raise PolicyError(
                f"the policy attends to {len(attention.rows)} of {len(self.requests)} requests of the batch: attend to "
                "all of them at once"
            )
        if attention.method != "dense":
            raise PolicyError(f"the policy attends with method {attention.method!r}: in tiers only 'dense' works")

    def _check_states(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise Unsupported if keys and values, (B, H, new, ...), differ from the first ones in shape or dtype."""
        if keys.device != self.kv.device:
            raise UnsupportedModelError(f"keys are on {keys.device}, this session's tiers are for {self.kv.device}")
        before, now = (len(self.requests), self._format), (keys.shape[0], _format_of(keys, values))
        if before != now:
            was, is_now = (
                f"{rows} x {f.kv_heads} x {f.k_channels} and {f.v_channels} of {f.value_dtype}"
                for rows, f in (before, now)
                if f
            )
            raise UnsupportedModelError(
                f"this cache holds keys and values of {was} (sequences, heads, channels), and is given {is_now}"
            )

    def _check_device(self, tokens: int, rows: int) -> None:
        """Raise PolicyError if one layer does not fit on the device: then no policy could attend it."""
        assert self._format
        limit, need = self.kv.tiers.device, rows * self._format.row_bytes * tokens
        if limit is not None and need > limit:
            raise PolicyError(
                f"keys and values of one layer take {need:,} bytes at {tokens:,} tokens of {rows} "
                f"sequences, and the device has {limit:,}: raise its limit (TierLimits.device, --device-kv-mib)"
            )

    def checked(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs of a forward that we attend to, with masks of four dimensions as True and False.

        Raises:
            Unsupported: Before anything runs. Drives do not store padding, so a mask must hide the same earlier
                positions in every forward, and every query head must see the same tokens.
        """
        if inputs.get("output_attentions") or getattr(self.config, "output_attentions", False):
            raise UnsupportedModelError("output_attentions: attention weights stay in the drives: leave it out")
        mask, past = inputs.get("attention_mask"), self.get_seq_length()
        if isinstance(mask, dict):
            return inputs | {"attention_mask": {kind: _visible(of_kind) for kind, of_kind in mask.items()}}
        stored, earlier = self.valid[:, :past], np.ones((len(self.valid), past), bool)
        if mask is not None:
            if mask.dim() != 2:
                return inputs | {"attention_mask": _visible(mask)}  # compared when attention sees it
            earlier = mask[:, :past].to("cpu", torch.bool).numpy()
        if past and not np.array_equal(earlier, stored):
            raise UnsupportedModelError(
                "the attention mask changed for earlier tokens: pass attention_mask in every forward, with the same "
                "columns for these, or start a new cache"
            )
        return inputs

    def admit(self, mask: torch.Tensor | None, batch: int, past: int, new: int) -> NDArray[np.bool_]:
        """Which of the `new` positions after `past` are tokens rather than padding, (batch, new) bool.

        The last query of a causal mask sees every token and no padding.
        """
        if mask is None:
            row = np.concatenate([self.valid[:, :past], np.ones((batch, new), bool)], axis=1)
        elif mask.dtype != torch.bool:
            raise UnsupportedModelError(f"an attention mask of {mask.dtype}: only boolean padding masks are supported")
        else:
            row = mask[:, 0, -1].expand(batch, past + new).to("cpu", torch.bool).numpy()
        if not np.array_equal(row[:, :past], self.valid[:, :past]):
            raise UnsupportedModelError("the attention mask changed for earlier tokens: start a new cache")
        self.valid = row
        return row[:, past:]

    def crop_layer(self, layer: int, length: int) -> None:
        """Keep the first `length` positions of one of our layers."""
        counts = self.valid[:, :length].sum(axis=1).tolist() if self.attends else [length] * len(self.requests)
        with self.kv.access.hold():
            self.kv.crop(layer, dict(zip(self.requests, counts, strict=True)))
        if all(own_layer.length == length for own_layer in self.own_layers):
            self.valid = self.valid[:, :length]

    def check_use(self, layer: int) -> None:
        """Raise if the model no longer uses our attention, or did not call it for the previous layer."""
        if self.attends and (layer == 0 or not self._in_forward):  # once per forward: reading the config is slow
            implementation = self.config._attn_implementation
            if implementation != IMPLEMENTATION:
                raise UnsupportedModelError(
                    f"this cache's KV data is in drives, and the model now uses attention {implementation!r}: "
                    "use the cache inside vcsd.attach"
                )
        if not self._in_forward:
            raise UnsupportedModelError(
                f"the KV data of this cache is {self.where}: pass the cache to the model that vcsd.attach was given"
            )
        self._check_attended()

    def _check_attended(self) -> None:
        if self.pending is not None:
            layer = self.pending.index
            raise UnsupportedModelError(
                f"the model did not pass the cached keys of layer {layer} to its attention unchanged"
            )

    def check_whole(self) -> None:
        """Raise Unsupported if a forward on this cache has failed."""
        if self._torn:
            raise UnsupportedModelError("a forward on this cache has failed half way: start a new cache")

    def refuse(self, reason: str) -> NoReturn:
        """Raise Unsupported for an operation that our layers do not support.

        Layers of the model's own (sliding windows) may have executed it already; then the cache is unusable.
        """
        self._torn |= len(self.own_layers) < len(self.layers)
        raise UnsupportedModelError(reason)

    def part(self, rows: slice, micro_batch: MicroBatch) -> KvCache:
        """View of the sequences in `rows`, for one micro-batch of one decode step."""
        part = KvCache(self.kv, self.config, self.layers, self.placed)
        part.requests, part.valid, part.micro_batch = self.requests[rows], self.valid[rows], micro_batch
        part.latents, part._in_forward = self.latents, True
        for own_layer, theirs in zip(self.own_layers, part.own_layers, strict=True):
            theirs.length, theirs.is_initialized = own_layer.length, True
        return part

    def merge(self, parts: list[KvCache]) -> None:
        """Take over the state of the micro-batches of a step."""
        self.valid = np.concatenate([part.valid for part in parts])
        self._runs = any(part._runs for part in parts)
        for own_layer, theirs in zip(self.own_layers, parts[0].own_layers, strict=True):
            own_layer.length = theirs.length

    def replace_layers(self, cache: Cache) -> None:
        """Replace the layers of a user's cache by these."""
        if cache is not self:
            cache.layers, cache.csd_cache = self.layers, self

    def _free(self) -> None:
        if self._release is not None:
            self._release()
        self._release, self.requests = None, []

    def close(self) -> None:
        """Free the data; the cache may be filled again."""
        self._free()
        self.pending, self._torn = None, False

    def detach(self) -> list[Hashable]:
        """Return the requests and give up their ownership: dropping the cache no longer frees them."""
        assert self._release is not None
        self._release.detach()
        return self.requests


class RowCache(KvCache):
    """The rows of one forward of a server: requests of different lengths, which the server owns."""

    ragged = True

    def __init__(self, kv: KvTable, windows: Sequence[int], requests: Sequence[Hashable]) -> None:
        """Create it.

        Args:
            kv: KV data of all requests.
            windows: Sliding window of each layer of the model, tokens; 0: full attention.
            requests: Request of each row.
        """
        super().__init__(kv, None, windows, [index for index, window in enumerate(windows) if not window])
        bounded = itertools.count()
        for index, window in enumerate(windows):
            if window:
                self.layers[index] = KvLayer(self, index, next(bounded), window)
        self.requests, self.attends = list(requests), True
        longest = max(map(kv.tokens, requests))
        for layer in self.own_layers:
            layer.length, layer.is_initialized = longest, True

    def check_use(self, layer: int) -> None:
        """Nothing to check: `RowModel` calls the model."""


def _format_of(keys: torch.Tensor, values: torch.Tensor) -> KVFormat:
    """Format of a model's own keys and values, (B, H, new, ...)."""
    return KVFormat(keys.dtype, keys.shape[1], keys.shape[3], values.shape[3])


def _stacked(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows as a batch; without a copy if there is just one."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _visible(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask (B, 1, new, positions) as True where a query sees a token; it may be given as terms of the logits."""
    if mask is None or mask.dim() != 4:
        return mask
    visible = mask if mask.dtype == torch.bool else mask == 0
    # Terms of the least value hide a token; any other one than 0 would be a bias, which drives do not know
    is_binary = mask.dtype == torch.bool or bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all())
    if mask.shape[1] > 1 or not is_binary:
        raise UnsupportedModelError(
            f"an attention_mask {tuple(mask.shape)} of {mask.dtype}: drives need one for all heads, (batch, 1, new, "
            "positions), that only shows or hides tokens"
        )
    return visible
