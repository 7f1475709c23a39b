"""Attention to a `KvCache` in drives or of a server's requests, called by transformers instead of sdpa.

- Whole prompts attend to themselves as the model does; k and v are shipped to their tier in the background.
- One new token of each row: where its blocks are in drives, q, k and v are sent there and the output comes back.
- Several new tokens on a filled cache, and blocks in other tiers: on the model's device, each row to its own KV data as
  it is stored, so that the tokens of a request depend neither on the other rows nor on the tier. The drive's engine is
  sized for decode, and many queries share each byte that is read back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attention_engine import all_finite, merge
from csd_spec import DriveError
from csd_spec.arrays import F16, F32
from host_driver.drive_tier import DriveTier
from host_driver.driver import Driver
from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.cache import KvLayer, Rows
from host_driver.hf.device import apply_cap_and_bias, attend_on_device
from host_driver.hf.latent import MARK
from host_driver.hf.shape import UnsupportedModelError
from host_driver.hf.staging import stage, unstage
from host_driver.kv_table import KvTable
from kv_cache.block_table import PolicyError
from kv_cache.hardware import CSD
from kv_cache.transfer.engine import AttendCall

ROUNDING = 1e-9  # tolerance of a scale in double precision, far below the precision of q
TERMS = ("softcap", "s_aux", "slopes")  # logit terms, see `csd_spec.Attend`

Terms = dict[str, Any]  # scaling and logit terms of a model's layer


def kv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface function: keys that carry a `KvLayer` are attended by their cache, others by sdpa.

    Args:
        module: The attention module.
        query: (B, q_heads, new, d).
        key, value: New tokens, (B, kv_heads, new, ...); with latent attention both are the cached rows.
        attention_mask: True where a query sees a token; None: causal.
        scaling: Factor of the logits; None: 1 / sqrt(d).
        **kwargs: Logit terms of the model.

    Returns:
        Output (B, new, q_heads, d of V), and None.
    """
    layer: KvLayer | None = getattr(key, MARK, None)
    if layer is None:
        return attend_on_device(module, query, key, value, attention_mask, kwargs | {"scaling": scaling}), None
    check_asked(module, kwargs, ("position_bias",) if layer.window else ("position_bias", "sliding_window"))
    terms = {name: kwargs.get(name) for name in TERMS}
    terms["scaling"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer.window:
        return _in_windows(layer, module, (query, key, value), terms).transpose(1, 2), None
    rows = _enter(layer, module, key, attention_mask, terms)
    attention = _Attention(layer, module, rows, rows.cache.kv, terms)
    latent = layer.latent_space(module, key)
    if not layer.length:
        out = attention.whole_prompts(query, key, value)
    elif latent is None or not attention.kv.drives:
        out = attention.stored_rows(query, key, value).transpose(1, 2)
    else:  # drives attend in latent space; so does the device, so that tokens do not depend on the tier
        out = latent.outputs(attention.stored_rows(latent.queries(query), key, value).transpose(1, 2))
    layer.length += key.shape[2]
    return out, None


def check_asked(module: torch.nn.Module, kwargs: dict[str, Any], unserved: Sequence[str]) -> None:
    """Raise Unsupported if a model's attention needs something that drives do not support."""
    for name in unserved:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} attends with {name}, which drives do not support")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModelError(f"{type(module).__name__} attends to later tokens, which drives do not support")
    if module.training:
        raise UnsupportedModelError("attention in drives has no gradients (inference only): call model.eval() first")


def register(name: str) -> None:
    """Register the attention with transformers. Without an entry in the second table the mask is silently None."""
    AttentionInterface.register(name, kv_attention)
    AttentionMaskInterface.register(name, mask_of)


def mask_of(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """sdpa's mask, True where a query sees a token; None if it is trivial and the model does not need it."""
    adapter = ADAPTERS.get(getattr(config, "model_type", ""))
    if adapter and adapter.whole_mask:
        kwargs["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(*args, config=config, **kwargs)
    return mask


def _enter(layer: KvLayer, module: torch.nn.Module, key: torch.Tensor, mask: torch.Tensor | None, terms: Terms) -> Rows:
    """Begin a layer's attention to new keys (B, kv_heads, new, ...); at the first layer, an iteration."""
    cache, (batch, _, new, _), past = layer.cache, key.shape, layer.length
    if cache.pending is not layer:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends twice to keys that it caches once, which drives do not support"
        )
    cache.pending = None
    if cache.rows and cache.rows.are_of(past, new, mask):
        return cache.rows
    numbers = {request: row for row, request in enumerate(cache.requests)}
    if cache.ragged:  # all are tokens, and the server has begun the iteration
        cache.rows = Rows(cache, past, mask, cache.requests, np.ones((batch, new), bool), True, numbers)
        return cache.rows
    admitted = cache.admit(mask, batch, past, new)
    if terms["slopes"] is not None and (cache.valid[:, :-1] & ~cache.valid[:, 1:]).any():
        raise UnsupportedModelError(
            "padding after tokens: ALiBi distances would depend on the model's implementation: pad on the left"
        )
    counts = admitted.sum(axis=1).tolist()
    tokens = {request: count for request, count in zip(cache.requests, counts, strict=True) if count}
    cache.begin(tokens)
    cache.rows = Rows(cache, past, mask, list(tokens), admitted, bool(admitted.all()), numbers)
    return cache.rows


def _in_windows(
    layer: KvLayer,
    module: torch.nn.Module,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    terms: Terms,
) -> torch.Tensor:
    """Attend each row's q, k, v (B, heads, new, ...) to its window, and keep the tokens that the next token sees."""
    cache, (query, key, value), out = layer.cache, states, []
    cache.pending = None
    windows, k, v = cache.kv.windows, key.transpose(1, 2), value.transpose(1, 2)
    for row, request in enumerate(cache.requests):
        place = request, layer.number
        before = windows.get(place, (k[row, :0], v[row, :0]))
        keys, values = torch.cat([before[0], k[row]]), torch.cat([before[1], v[row]])
        mask = _causal(query.shape[2], len(keys), query.device, layer.window)
        out.append(_attend_row(module, query[row], _expanded(layer, module, keys, values), mask, terms))
        visible = slice(max(0, len(keys) - layer.window + 1), None)
        windows[place] = keys[visible].clone(), values[visible].clone()
    return torch.stack(out)


def set_logit_terms(driver: Driver, number: int, query: torch.Tensor, terms: Terms) -> None:
    """Set the terms of a layer's logits in the driver, once, if it has any; query (B, q_heads, new, d)."""
    if number in driver.terms or all(terms[name] is None for name in TERMS):
        return
    shape = driver.shape
    scale = terms["scaling"] or query.shape[-1] ** -0.5
    table = np.tile(np.array([scale, np.inf, -np.inf, 0], np.float32), (shape.kv_heads, shape.group, 1))
    for column, name in enumerate(TERMS, start=1):
        if terms[name] is not None:
            per_head = torch.as_tensor(terms[name], dtype=torch.float32).cpu().numpy()
            table[:, :, column] = np.broadcast_to(per_head, shape.q_heads).reshape(shape.kv_heads, shape.group)
    driver.terms[number] = table


def check_range(driver: Driver, index: int, states: torch.Tensor, rows: F16) -> None:
    """Raise Unsupported if values are beyond the range of FP16, with the value and the layer."""
    if not driver.bf16 and not all_finite(np.ascontiguousarray(rows)):
        largest = float(states.abs().max())
        raise UnsupportedModelError(
            f"layer {index} has {largest:,.0f} in q, K or V, beyond FP16's 65,504: use kv_dtype='bf16'"
        )


@dataclass(slots=True)
class _Attention:
    """Attention of one layer in a forward.

    Attributes:
        layer: The layer.
        module: The model's attention.
        rows: The rows that attend.
        kv: Their KV data.
        terms: Scaling and terms of the model's attention; in drives, what is left of the scaling.
    """

    layer: KvLayer
    module: torch.nn.Module
    rows: Rows
    kv: KvTable
    terms: Terms

    @property
    def drives(self) -> DriveTier:
        assert self.kv.drives
        return self.kv.drives

    def whole_prompts(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend whole prompts to themselves as the model does, in its own precision, and store their keys and values.

        Args:
            query: Queries (B, q_heads, new, d).
            key, value: Keys and values, (B, kv_heads, new, ...).

        Returns:
            Output (B, new, q_heads, d of V).
        """
        for call in self.kv.enter_rows(self.layer.number, self.rows.requests):
            if CSD in call.tiers:
                self._ship(call, key, value)
                continue
            for request in call.rows:
                self._append(call, request, key, value)
        if self.kv.drives:
            set_logit_terms(self.drives.driver, self.layer.number, query, self.terms)
        latent = self.layer.latent_space(self.module, key)
        keys, values = (key, value) if latent is None else latent.expand(key)
        mask = None if self.rows.cache.ragged else self.rows.mask
        return attend_on_device(self.module, query, keys, values, mask, self.terms)

    def stored_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store new tokens and attend each row in its tier, to its KV data as stored there.

        Args:
            query: Queries (B, q_heads, new, d).
            key, value: Keys and values, (B, kv_heads, new, ...); with latent attention both are the cached rows.

        Returns:
            Output (B, q_heads, new, d of V); zeros for padding.
        """
        rows, dtype = self.rows, query.dtype
        if self.kv.drives:
            query = self._scaled(query)
        out: torch.Tensor | None = None
        for call in self.kv.enter_rows(self.layer.number, rows.requests):
            in_drives = CSD in call.tiers and query.shape[2] == 1
            outputs = (self._in_drives if in_drives else self._on_device)(call, query, key, value)
            if rows.whole and call.rows == tuple(rows.numbers):
                return (outputs if isinstance(outputs, torch.Tensor) else torch.stack(outputs)).to(dtype)
            out = query.new_zeros(*query.shape[:3], outputs[0].shape[-1], dtype=dtype) if out is None else out
            for request, output in zip(call.rows, outputs, strict=True):
                positions = slice(None) if rows.whole else rows.positions(request).to(out.device)
                out[rows.numbers[request]][:, positions] = output.to(dtype)
        return query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype) if out is None else out

    def _scaled(self, query: torch.Tensor) -> torch.Tensor:
        """Queries as drives take them, which divide by sqrt(d) unless they know the layer's own scale."""
        driver, scaling = self.drives.driver, self.terms["scaling"]
        set_logit_terms(driver, self.layer.number, query, self.terms)
        factor = 1.0 if self.layer.number in driver.terms else scaling * query.shape[-1] ** 0.5
        if abs(factor - 1) <= ROUNDING:
            return query
        self.terms = self.terms | {"scaling": scaling / factor}
        return query * factor

    def _ship(self, call: AttendCall, key: torch.Tensor, value: torch.Tensor) -> None:
        """Ship the tokens of new k and v to the drives in the background."""
        rows, index, drives = self.rows, self.layer.index, self.drives
        staged, numbers = stage(key, value, bf16=drives.driver.bf16), [rows.numbers[request] for request in call.rows]
        new = rows.new[numbers]

        def load() -> tuple[F16, F16]:  # may run after the cache is dropped
            k, v = (part[numbers].transpose(0, 2, 1, 3)[new] for part in staged())
            check_range(drives.driver, index, key, k)
            check_range(drives.driver, index, value, v)
            return k, drives.padded(v)

        drives.append(call.rows, self.layer.number, new.sum(axis=1).astype(np.int64), load)

    def _append(
        self, call: AttendCall, request: Hashable, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a request's new keys and values on the device.

        Returns:
            Keys and values of all its tokens, (S, kv_heads, ...) each.
        """
        blocks = [self.kv.stored(block) for block in self.kv.blocks(request, call.layer)]
        for stored, new in zip(blocks[-1], self.rows.stored(request, key, value), strict=True):
            stored[len(stored) - len(new) :] = new
        k, v = (_consecutive(pieces) for pieces in zip(*blocks, strict=True))
        return k, v

    def _read_back(
        self, call: AttendCall, key: torch.Tensor, value: torch.Tensor
    ) -> dict[Hashable, tuple[torch.Tensor, torch.Tensor]]:
        """Ship new tokens to drives.

        Returns:
            Keys and values of all tokens of each request, (S, kv_heads, ...) each.
        """
        if len(call.tiers) > 1:
            raise PolicyError("several new tokens are attended in drives after other blocks: attend on the device")
        joined, before = dict[Hashable, tuple[torch.Tensor, torch.Tensor]](), self.drives.read(call.rows, call.layer)
        self._ship(call, key, value)
        for request, stored in zip(call.rows, before, strict=True):
            new = self.rows.stored(request, key, value)
            tensors = (torch.from_numpy(part).view(self.kv.format.value_dtype).to(key.device) for part in stored)
            k, v = (torch.cat(parts) for parts in zip(tensors, new, strict=True))
            joined[request] = k, v
        return joined

    def _in_drives(self, call: AttendCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store one new token of each row in drives and attend there; earlier blocks on the device. Merges both.

        Returns:
            Output (R, q_heads, 1, d of V).
        """
        kv, layer, micro_batch = self.kv, self.layer, self.rows.cache.micro_batch
        if micro_batch is None:
            raise UnsupportedModelError(
                "this forward did not go through the model that vcsd.attach was given: call that model"
            )
        states = [query, key, value]
        if call.rows != tuple(self.rows.numbers):
            numbers = [self.rows.numbers[request] for request in call.rows]
            states = [part[numbers] for part in states]
        driver, block = self.drives.driver, len(call.tiers) - 1
        q, k, v = _staged(states, driver.bf16)
        try:
            out, sums = self.drives.attend_block(call.rows, block, micro_batch, layer.number, q, k, v)
        except DriveError:
            for part, staged in zip(states, (q, k, v), strict=True):
                check_range(driver, layer.index, part, staged)
            raise
        if not block:
            return unstage(out[:, :, None], query, driver.bf16)
        sent = kv.format.rounded(states[0]).float()
        parts = [self._part(request, row) for request, row in zip(call.rows, sent, strict=True)]
        before, weights = (np.stack(arrays) for arrays in zip(*parts, strict=True))
        merged, _ = merge([before, unstage(out, sent, driver.bf16).cpu().numpy()], [weights, sums])
        return torch.from_numpy(merged).to(query.device, kv.format.value_dtype)[:, :, None]

    def _part(self, request: Hashable, q: torch.Tensor) -> tuple[F32, F32]:
        """Attention of a row, q (q_heads, 1, d), to its blocks on the device.

        An attention sink is counted by the drives, which have the last block, and not here.

        Returns:
            Output (q_heads, d of V), and m and l, (q_heads, 2).
        """
        kv, layer = self.kv, self.layer.number
        blocks = [kv.stored(block) for block in kv.blocks(request, layer)[:-1]]
        keys, values = (_consecutive(pieces).float() for pieces in zip(*blocks, strict=True))
        group, tokens = q.shape[0] // keys.shape[1], len(keys)
        # (q_heads, tokens, ...) each
        k, v = (
            states.transpose(0, 1).repeat_interleave(group, dim=0)
            for states in (keys, keys if kv.format.latent else values)
        )
        behind = kv.tokens(request, layer) - 1 - torch.arange(tokens, device=q.device)
        logits = q.float() @ k.transpose(1, 2) * self.terms["scaling"]
        logits = apply_cap_and_bias(logits, behind[None], self.terms)[:, 0]
        m = logits.max(dim=1, keepdim=True).values
        weights = (logits - m).exp()
        l = weights.sum(dim=1, keepdim=True)  # noqa: E741 - name in the interface
        out = (weights[:, None] @ v)[:, 0] / l
        return out.cpu().numpy(), torch.cat([m, l], dim=1).cpu().numpy()

    def _on_device(
        self, call: AttendCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[torch.Tensor]:
        """Store new keys and values; attend each row on the device, to which those in drives are read back.

        Returns:
            Output of each request's tokens, (q_heads, tokens, d of V).
        """
        kv_format, out = self.kv.format, []
        read_back = self._read_back(call, key, value) if CSD in call.tiers else {}
        for request in call.rows:
            k, v = read_back[request] if read_back else self._append(call, request, key, value)
            q = self.rows.tokens(query, request)
            if self.kv.drives:  # rounded as drives round, attended in at least FP32 as there
                q = kv_format.rounded(q).to(torch.promote_types(q.dtype, torch.float32))
                v = k if kv_format.latent else v
            else:
                k, v = _expanded(self.layer, self.module, k, v)
            mask = self.rows.mask_of(request)
            mask = _causal(q.shape[1], len(k), q.device) if mask is None else mask
            output = _attend_row(self.module, q, (k, v), mask, self.terms)
            out.append(output.to(kv_format.value_dtype) if self.kv.drives else output)
        return out


def _expanded(
    layer: KvLayer, module: torch.nn.Module, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each head, (S, heads, ...), from the cached rows of a layer, (S, kv_heads, ...)."""
    latent = layer.latent_space(module, k)
    if latent is None:
        return k, v
    keys, values = latent.expand(k.transpose(0, 1)[None])
    return keys[0].transpose(0, 1), values[0].transpose(0, 1)


def _consecutive(blocks: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Consecutive blocks of a request as one."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _staged(states: list[torch.Tensor], bf16: bool) -> tuple[F16, F16, F16]:
    """One new token's q, k and v, (R, heads, 1, channels) each, on the host without the token axis."""
    if states[0].shape[-1] != states[2].shape[-1]:
        q, k, v = stage(*(part[:, :, 0] for part in states), bf16=bf16)()
        return q, k, v
    (together,) = stage(torch.cat(states, dim=1), bf16=bf16)()  # small steps are dominated by overhead: one copy
    rows, of_q, of_k = together[:, :, 0], states[0].shape[1], states[1].shape[1]
    return rows[:, :of_q], rows[:, of_q : of_q + of_k], rows[:, of_q + of_k :]


def _causal(count: int, tokens: int, device: torch.device, window: int = 0) -> torch.Tensor | None:
    """Mask of the last `count` of `tokens` tokens, (1, 1, count, tokens); None if all are visible.

    Args:
        count: Queries.
        tokens: Keys.
        device: The model's device.
        window: Length of the sliding window, tokens; 0: full attention.
    """
    if count == 1:
        return None  # a window holds no other tokens
    mask = torch.ones(1, 1, count, tokens, dtype=torch.bool, device=device).tril(tokens - count)
    return mask.triu(tokens - count - window + 1) if window else mask


def _attend_row(
    module: torch.nn.Module,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    terms: Terms,
) -> torch.Tensor:
    """Attend a row's last tokens to its keys and values.

    Args:
        module: The attention module.
        q: Queries, (q_heads, new, d).
        kv: All keys and values, (S, kv_heads, ...) each.
        mask: Mask (1, 1, new, S); None: all tokens are visible.
        terms: Scaling and terms of the model's attention.

    Returns:
        Output (q_heads, new, d of V).
    """
    k, v = (states.to(q.dtype).transpose(0, 1)[None] for states in kv)
    if all(terms[name] is None for name in TERMS):
        return scaled_dot_product_attention(q[None], k, v, mask, scale=terms["scaling"], enable_gqa=True)[0]
    return attend_on_device(module, q[None], k, v, mask, terms)[0].transpose(0, 1)
