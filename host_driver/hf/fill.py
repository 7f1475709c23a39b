"""Ships caches filled by plain transformers into drives, as if the prompts had been prefilled there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from csd_spec.arrays import F16
from host_driver.driver import Driver
from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.attention import check_range
from host_driver.hf.cache import KvCache
from host_driver.hf.shape import LayerPlacement
from host_driver.hf.staging import stage
from host_driver.kv_table import KvTable


def can_fill(model: PreTrainedModel, placed: LayerPlacement) -> bool:
    """Whether `filled` supports a model: all layers are in drives, which store the same rows as a plain cache."""
    adapted = model.config.get_text_config(decoder=True).model_type in ADAPTERS
    return not (placed.is_mixed or placed.shape.latent or adapted)


@torch.inference_mode()
def filled(model: PreTrainedModel, kv: KvTable, placed: LayerPlacement, caches: Sequence[Cache]) -> KvCache:
    """Create a cache in drives and ship the keys and values of other caches into it.

    Args:
        model: Attached to drives; `can_fill` is true for it.
        kv: The KV data of the session.
        placed: Placement of the model's layers.
        caches: One for each sequence, each of one row without padding.

    Returns:
        The cache of all sequences, padded on the left to the longest: give it to the model as its cache.

    Raises:
        Unsupported: A value is beyond FP16's range.
        DriveError: A drive refuses the rows.
    """
    config = model.config.get_text_config(decoder=True)
    cache = KvCache(kv, config, placed.in_drives, placed.in_drives)
    lengths = np.array([source.get_seq_length() for source in caches], np.int64)
    longest = int(lengths.max())
    cache.create(len(caches))
    cache.valid = np.arange(longest) >= longest - lengths[:, None]
    assert kv.drives
    for layer in cache.own_layers:
        load = _LayerRows(kv.drives.driver, layer.index, [source.layers[layer.index] for source in caches])
        kv.drives.append(cache.requests, layer.number, lengths, load)
        layer.length, layer.is_initialized = longest, True
    kv.store_in_drives(dict(zip(cache.requests, lengths.tolist(), strict=True)), range(len(placed.in_drives)))
    kv.settle(cache.requests)
    return cache


class _LayerRows:
    """Loads one layer's rows of all sequences, when called."""

    def __init__(self, driver: Driver, index: int, layers: list[Any]) -> None:
        self.driver, self.index, self.layers = driver, index, layers

    def __call__(self) -> tuple[F16, F16]:
        """Keys and values, each (sum of tokens, kv_heads, d) as the drives store them."""
        joined = []
        for kind in ("keys", "values"):
            rows = torch.cat([getattr(layer, kind)[0].transpose(0, 1) for layer in self.layers])
            (stored,) = stage(rows, bf16=self.driver.bf16)()
            check_range(self.driver, self.index, rows, stored)
            lacking = self.driver.shape.head_dim - stored.shape[2]  # narrower values are padded with zeros
            joined.append(np.pad(stored, ((0, 0), (0, 0), (0, lacking))) if lacking else stored)
        return joined[0], joined[1]
