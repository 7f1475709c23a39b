"""A transformers cache with the KV data of full-attention layers in drives; other layers keep their own cache.

A model calls `cache.update(k, v)` and then the attention function with the result. Update returns only the new k and v;
the key tensor carries its `CsdLayer`, which tells `host_driver.hf.attention` the cache and layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from host_driver.batch import Batch, MicroBatch
from host_driver.driver import Driver
from host_driver.hf.external_cache import ExternalCache, ExternalLayer
from host_driver.hf.latent import Latent
from host_driver.hf.shape import UnsupportedModelError

IMPLEMENTATION = "csd"


class CsdLayer(ExternalLayer["CsdCache"]):
    """One layer of a `CsdCache`."""

    def __init__(self, cache: CsdCache, index: int, number: int) -> None:
        super().__init__(cache, index, number)
        self._latent: Latent | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = self.cache.driver.shape
        if shape.latent and (key_states.shape[1], key_states.shape[3] + value_states.shape[3]) == (1, shape.head_dim):
            self.cache.open(key_states.shape[0])
            self.is_initialized = True
            return
        of_v = shape.v_head_dim or shape.head_dim
        for name, states, channels in (("key", key_states, shape.head_dim), ("value", value_states, of_v)):
            if states.shape[1] != shape.kv_heads or states.shape[3] != channels:
                raise UnsupportedModelError(
                    f"layer {self.index} caches {name}s of {states.shape[1]} heads x {states.shape[3]} channels; "
                    f"drives serve {shape.kv_heads} x {channels}, the same in every layer"
                )
        self.cache.open(key_states.shape[0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.cache
        cache.check_use(self.number)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = key_states.view(key_states.shape)  # a new tensor object, so that no other reference is marked
        keys.csd_layer = cache.pending = self  # type: ignore[attr-defined]  # read by csd_attention
        shape = cache.driver.shape
        if shape.v_head_dim:
            value_states = torch.nn.functional.pad(value_states, (0, shape.head_dim - shape.v_head_dim))
        return keys, value_states

    def latent_space(self, module: torch.nn.Module, rows: torch.Tensor) -> Latent:
        """Conversion to latent space of a layer that expands keys and values from rows; created once."""
        if self._latent is None:
            self._latent = Latent(module, rows)
        return self._latent

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.cache.refuse("beam search moves sequences between rows, which drives do not support: use num_beams=1")


class CsdCache(ExternalCache):
    """A transformers cache with KV data in drives. Dropping it frees the sequences.

    Attributes:
        layers: Layers of the model's own cache; those in drives are replaced by `CsdLayer`.
        valid: Which positions are stored, (B, positions) bool; padding is not.
        pending: The layer whose keys were returned by `update` and not attended yet.
    """

    def __init__(
        self, driver: Driver, config: Any, max_tokens: int, layers: Sequence[Any], in_drives: Sequence[int]
    ) -> None:
        ours = {index: CsdLayer(self, index, number) for number, index in enumerate(in_drives)}
        super().__init__([ours.get(index, layer) for index, layer in enumerate(layers)], driver)
        self.driver, self.config, self.max_tokens, self.in_drives = driver, config, max_tokens, in_drives
        self.batch: Batch | None = None
        self.rows = slice(None)
        self.micro_batch: MicroBatch | None = None
        self.valid: NDArray[np.bool_] = np.zeros((0, 0), bool)
        self.pending: CsdLayer | None = None
        self._seen: tuple[torch.Tensor | None, NDArray[np.bool_]] | None = None

    def open(self, count: int) -> None:
        """Create the sequences of all layers; no effect if they exist."""
        if self.batch is None:
            self.batch = self.driver.create(count, self.max_tokens)
            self.valid = np.zeros((count, 0), bool)
            self.keep(self.driver.access, self.batch)

    def close(self) -> None:
        super().close()
        self.batch = self.pending = None

    def detach(self) -> Batch:
        """Return the sequences and give up their ownership: dropping the cache no longer frees them."""
        assert self.batch is not None and self._release is not None
        self._release.detach()
        return self.batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self.driver.access.hold(), super().forward():
            yield
            self._seen = None

    def checked(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs of a forward, with masks of four dimensions as True and False.

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

    def crop_layer(self, layer: int, length: int) -> None:
        assert self.batch is not None
        with self.driver.access.hold():
            self.driver.crop(self.batch, layer, self.valid[:, :length].sum(axis=1).astype(np.int64))
        if all(own_layer.length == length for own_layer in self.own_layers):
            self.valid = self.valid[:, :length]

    @property
    def own_layers(self) -> list[CsdLayer]:
        """Layers in drives."""
        return [layer for layer in self.layers if isinstance(layer, CsdLayer)]

    def check_use(self, layer: int) -> None:
        """Raise if the model no longer uses our attention, or did not call it for the previous layer."""
        if layer == 0 or not self._in_forward:  # once per forward: reading the config is slow
            implementation = self.config._attn_implementation
            if implementation != IMPLEMENTATION:
                raise UnsupportedModelError(
                    f"this cache's KV data is in drives, and the model now uses attention {implementation!r}: "
                    "use the cache inside vcsd.attach"
                )
        self.check_in_forward()
        self.end_forward()

    def end_forward(self) -> None:
        if self.pending is not None:
            layer = self.pending.index
            raise UnsupportedModelError(
                f"the model did not pass the cached keys of layer {layer} to its attention unchanged"
            )

    @contextmanager
    def whole(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Run a decode step of all sequences as one micro-batch."""
        self.micro_batch = micro_batch
        try:
            yield
        finally:
            self.micro_batch = None

    def part(self, rows: slice, micro_batch: MicroBatch) -> CsdCache:
        """View of the sequences in `rows`, for one micro-batch of one decode step."""
        part = CsdCache(self.driver, self.config, self.max_tokens, self.layers, self.in_drives)
        part.batch, part.rows, part.micro_batch, part.valid = self.batch, rows, micro_batch, self.valid[rows]
        part._in_forward = True
        for own_layer, theirs in zip(self.own_layers, part.own_layers, strict=True):
            theirs.length, theirs.is_initialized, theirs._latent = own_layer.length, True, own_layer._latent
        return part

    def merge(self, parts: list[CsdCache]) -> None:
        """Take over the state of the micro-batches of a step."""
        self.valid = np.concatenate([part.valid for part in parts])
        for own_layer, theirs in zip(self.own_layers, parts[0].own_layers, strict=True):
            own_layer.length = theirs.length

    def admit(self, mask: torch.Tensor | None, batch: int, past: int, new: int) -> NDArray[np.bool_]:
        """Which of the `new` positions after `past` are tokens rather than padding, (batch, new) bool.

        The last query of a causal mask sees every token and no padding.
        """
        if self._seen is None or self._seen[0] is not mask or self._seen[1].shape[1] != past + new:
            if mask is None:
                self.valid = row = np.concatenate([self.valid[:, :past], np.ones((batch, new), bool)], axis=1)
            else:
                if mask.dtype != torch.bool:
                    raise UnsupportedModelError(
                        f"an attention mask of {mask.dtype}: only boolean padding masks are supported"
                    )
                row = mask[:, 0, -1].expand(batch, past + new).to("cpu", torch.bool).numpy()
            self._seen = mask, row
        row = self._seen[1]
        if row is not self.valid and not np.array_equal(row[:, :past], self.valid[:, :past]):
            raise UnsupportedModelError("the attention mask changed for earlier tokens: start a new cache")
        self.valid = row
        return row[:, past:]


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
