"""Attention on a cache in drives, called by transformers instead of sdpa.

- Prefill (empty cache): attention runs on the model's device; k and v are shipped in the background.
- Decode (one new token): q, k and v are sent to the drives, which return the attention output.
- Several new tokens on a filled cache: the KV data of that layer is read back and attention runs on the model's device,
  as in a prefill. The drive's engine is sized for decode, and many queries share each byte read, so this costs one pass
  over the layer instead of one per query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attention_engine import all_finite
from csd_spec import DriveError
from csd_spec.arrays import F16
from host_driver.driver import Driver
from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.cache import IMPLEMENTATION, CsdLayer
from host_driver.hf.device import attend_on_device
from host_driver.hf.shape import UnsupportedModelError
from host_driver.hf.staging import stage, unstage

ROUNDING = 1e-9  # tolerance of a scale in double precision, far below the precision of q
TERMS = ("softcap", "s_aux", "slopes")  # logit terms, see `csd_spec.Attend`
UNSERVED = (*TERMS, "position_bias", "sliding_window")


def csd_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface function: keys that carry a `CsdLayer` are attended in drives, others by sdpa.

    Args:
        module: The attention module.
        query: (B, q_heads, new, d).
        key, value: (B, kv_heads, new, d).
        attention_mask: True where a query sees a token; None: causal.
        scaling: Factor of the logits; None: 1 / sqrt(d).
        **kwargs: Logit terms of the model.

    Returns:
        Output (B, new, q_heads, d), and None.
    """
    layer: CsdLayer | None = getattr(key, "csd_layer", None)
    if layer is None:
        return attend_on_device(module, query, key, value, attention_mask, kwargs | {"scaling": scaling}), None
    check_asked(module, kwargs, ("position_bias", "sliding_window"))
    terms = {name: kwargs.get(name) for name in TERMS} | {"scaling": scaling}
    out = _attend(layer, module, query, key, value, attention_mask, terms)
    return out[..., : layer.cache.driver.shape.v_head_dim], None  # padding of V is cut off


def check_asked(module: torch.nn.Module, kwargs: dict[str, Any], unserved: Sequence[str] = UNSERVED) -> None:
    """Raise Unsupported if a model's attention needs something that drives do not support."""
    for name in unserved:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} attends with {name}, which drives do not support")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModelError(f"{type(module).__name__} attends to later tokens, which drives do not support")
    if module.training:
        raise UnsupportedModelError("attention in drives has no gradients (inference only): call model.eval() first")


def register() -> None:
    """Register the attention with transformers. Without an entry in the second table the mask is silently None."""
    AttentionInterface.register(IMPLEMENTATION, csd_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_of)


def mask_of(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """sdpa's mask, True where a query sees a token; None if it is trivial and the model does not need it."""
    adapter = ADAPTERS.get(getattr(config, "model_type", ""))
    if adapter and adapter.whole_mask:
        kwargs["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(*args, config=config, **kwargs)
    return mask


def _attend(
    layer: CsdLayer,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    terms: dict[str, Any],
) -> torch.Tensor:
    """Attention output (B, new tokens, q_heads, d); stores the new k and v in the drives."""
    cache, (batch, _, new, _) = layer.cache, key.shape
    if cache.pending is not layer:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends twice to keys that it caches once, which drives do not support"
        )
    cache.pending = None
    past = layer.length
    if mask is not None and mask.shape[-1] > past + new:
        mask = mask[..., : past + new]  # the mask of a static cache covers its whole size
    admitted = cache.admit(mask, batch, past, new)
    if terms["slopes"] is not None and (cache.valid[:, :-1] & ~cache.valid[:, 1:]).any():
        raise UnsupportedModelError(
            "padding after tokens: ALiBi distances would depend on the model's implementation: pad on the left"
        )
    latent = layer.latent_space(module, key) if cache.driver.shape.latent else None
    if past and new == 1:
        query = query if latent is None else latent.queries(query)
        # Drives divide by sqrt(d). Another scale without further terms is applied to q.
        scaling = terms["scaling"]
        factor = 1.0 if scaling is None or layer.number in cache.driver.terms else scaling * query.shape[-1] ** 0.5
        if abs(factor - 1) > ROUNDING:
            query = query * factor
        out = _decode(layer, query, key, value, admitted[:, 0])
        out = out if latent is None else latent.outputs(out)
    else:
        keys, values = _read_back(layer, key, value) if past else (key, value)
        if latent is not None:
            keys, values = latent.expand(keys)
        set_logit_terms(cache.driver, layer.number, query, terms)
        out = attend_on_device(module, query, keys, values, mask, terms)
        _ship(layer, key, value, admitted)
    layer.length = past + new
    return out


def set_logit_terms(driver: Driver, number: int, query: torch.Tensor, terms: dict[str, Any]) -> None:
    """Set the terms of a layer's logits in the driver, if it has any; query (B, q_heads, new, d)."""
    if all(terms[name] is None for name in TERMS):
        return
    shape = driver.shape
    scale = terms["scaling"] or query.shape[-1] ** -0.5
    table = np.tile(np.array([scale, np.inf, -np.inf, 0], np.float32), (shape.kv_heads, shape.group, 1))
    for column, name in enumerate(TERMS, start=1):
        if terms[name] is not None:
            per_head = torch.as_tensor(terms[name], dtype=torch.float32).cpu().numpy()
            table[:, :, column] = np.broadcast_to(per_head, shape.q_heads).reshape(shape.kv_heads, shape.group)
    driver.terms[number] = table


def _decode(
    layer: CsdLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, admitted: NDArray[np.bool_]
) -> torch.Tensor:
    """Decode one token per sequence, (B, heads, 1, d) each; a row of padding is not stored and attends to nothing."""
    cache = layer.cache
    assert cache.batch is not None
    if cache.micro_batch is None:
        raise UnsupportedModelError(
            "this forward did not go through the model that vcsd.attach was given: call that model"
        )
    bf16, together = cache.driver.bf16, torch.cat((q, k, v), dim=1)
    (rows16,) = stage(together, bf16=bf16)()  # one staging of all three: small steps are dominated by overhead
    of_q, of_k = q.shape[1], k.shape[1]
    q16, k16, v16 = rows16[:, :of_q, 0], rows16[:, of_q : of_q + of_k, 0], rows16[:, of_q + of_k :, 0]
    try:
        if all(admitted.tolist()):
            out = cache.driver.decode(cache.batch, cache.rows, cache.micro_batch, layer.number, q16, k16, v16)
        else:
            out, rows = np.zeros(q16.shape, np.float16), (cache.rows.start or 0) + np.flatnonzero(admitted)
            if rows.size:
                new = (tensor[admitted] for tensor in (q16, k16, v16))
                out[admitted] = cache.driver.decode(cache.batch, rows, cache.micro_batch, layer.number, *new)
    except DriveError:
        check_range(cache.driver, layer.index, together, rows16)
        raise
    return unstage(out[:, None], q, bf16)


def check_range(driver: Driver, index: int, states: torch.Tensor, rows: F16) -> None:
    """Raise Unsupported if values are beyond the range of FP16, with the value and the layer."""
    if not driver.bf16 and not all_finite(np.ascontiguousarray(rows)):
        largest = float(states.abs().max())
        raise UnsupportedModelError(
            f"layer {index} has {largest:,.0f} in q, K or V, beyond FP16's 65,504: use kv_dtype='bf16'"
        )


def _ship(layer: CsdLayer, key: torch.Tensor, value: torch.Tensor, admitted: NDArray[np.bool_]) -> None:
    """Ship the tokens of new k and v to the drives in the background."""
    cache = layer.cache
    assert cache.batch is not None
    staged = stage(key, value, bf16=cache.driver.bf16)

    driver, index = cache.driver, layer.index  # `load` may run after the cache is dropped

    def load() -> tuple[Any, Any]:
        k, v = (array.transpose(0, 2, 1, 3)[admitted] for array in staged())
        check_range(driver, index, key, k)
        check_range(driver, index, value, v)
        return k, v

    cache.driver.append(cache.batch, cache.rows, layer.number, admitted.sum(axis=1).astype(np.int64), load)


def _read_back(layer: CsdLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of this layer including the new ones, (B, kv_heads, past + new, d); padding is zero."""
    cache = layer.cache
    assert cache.batch is not None
    stored = cache.driver.read(cache.batch, cache.rows, layer.number)
    valid = cache.valid[:, : layer.length]
    joined = []
    for rows, new in zip(stored, (key, value), strict=True):
        old = np.zeros((*valid.shape, *rows.shape[1:]), np.float16)
        old[valid] = rows
        before = unstage(old, new, cache.driver.bf16).transpose(1, 2)
        joined.append(torch.cat([before, new], dim=2))
    return joined[0], joined[1]
