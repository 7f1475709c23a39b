"""Forward of a transformers model over requests of different lengths with KV data in different tiers.

Each row attends separately to its stored KV data, so the tokens of a request do not depend on the other rows. Whole
prompts attend to themselves as the model does; a server computes one at a time.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from attention_engine import merge
from csd_spec.arrays import F16, F32
from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.attention import TERMS, check_asked, mask_of, set_logit_terms
from host_driver.hf.cache import IMPLEMENTATION as DRIVES
from host_driver.hf.cache_argument import forward_on
from host_driver.hf.device import apply_cap_and_bias, attend_on_device
from host_driver.hf.forward import check_not_attached, use_attention_interface, with_forward
from host_driver.hf.latent import Latent
from host_driver.hf.shape import FULL, SLIDING, UnsupportedModelError, placement
from host_driver.hf.staging import stage, unstage
from host_driver.kv_table import KvTable
from kv_cache.hardware import CSD
from kv_cache.iteration import TierAssignment
from kv_cache.transfer.engine import AttendCall

_BY_LONGEST = ("longrope", "dynamic")
IMPLEMENTATION = f"{DRIVES}-rows"
Latents = dict[torch.nn.Module, Latent | None]  # by attention module


class _Layer(CacheLayerMixin):
    """One layer of the cache object of a forward: marks keys so that attention finds their rows.

    Attributes:
        window: Length of the sliding window, tokens; 0: full attention.
        number: Index among the model's windows, or among the layers in tiers.
    """

    is_croppable = False

    def __init__(self, cache: _Rows, number: int, window: int) -> None:
        super().__init__()
        self.cache, self.number, self.window, self.is_initialized = cache, number, window, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to create."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = key_states.view(key_states.shape)  # a new tensor object
        keys.csd_rows = self  # type: ignore[attr-defined]  # read by row_attention
        return keys, value_states

    def latent_space(self, module: torch.nn.Module, rows: torch.Tensor) -> Latent | None:
        """Conversion of a layer with latent attention, created once; None for other layers."""
        latents = self.cache.latents
        if module not in latents:
            latents[module] = Latent(module, rows) if hasattr(module, "expand_kv") else None
        return latents[module]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return -1


class _Rows(Cache):
    """The rows of one forward.

    Args:
        kv: KV data of all requests.
        windows: Sliding window of each layer of the model, tokens; 0: full attention.
        new: New tokens of each request, in the order of the batch.
        latents: Latent conversions by attention module.
    """

    def __init__(self, kv: KvTable, windows: Sequence[int], new: Mapping[Hashable, int], latents: Latents) -> None:
        full, bounded = itertools.count(), itertools.count()
        layers = [_Layer(self, next(bounded if window else full), window) for window in windows]
        super().__init__(layers=layers)
        self.kv, self.latents = kv, latents
        self.numbers = {request: number for number, request in enumerate(new)}
        self.longest = max(map(kv.tokens, new))
        self.whole_prompts = not self.longest and max(new.values()) > 1


class RowModel:
    """A model, and the KV data of its requests."""

    def __init__(self, model: PreTrainedModel, kv: KvTable) -> None:
        self.model, self.kv = model, kv
        takes, name = inspect.signature(model.forward).parameters, type(model).__name__
        self._more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._positions = "position_ids" in takes
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        if kind := next((kind for kind in _BY_LONGEST if kind in _kinds_of_rope(model.config)), None):
            raise UnsupportedModelError(
                f"{name} scales positions by the longest sequence of a batch (rope of kind {kind})"
            )
        adapter = ADAPTERS.get(model.config.get_text_config(decoder=True).model_type)
        if not self._positions and not (adapter and adapter.by_distance):
            raise UnsupportedModelError(f"{name} takes no position_ids: requests of different lengths need them")
        placed = placement(model)
        if other := sorted(set(placed.kinds) - {FULL, SLIDING}):
            raise UnsupportedModelError(
                f"{name} has layers of kind {', '.join(other)}: only full attention and windows work"
            )
        self._latents: Latents = {}
        windows = iter(placed.windows)
        self._windows = [0 if kind == FULL else next(windows).tokens for kind in placed.kinds]

    @torch.inference_mode()
    def forward(self, tokens: Mapping[Hashable, Sequence[int]], assignment: TierAssignment) -> torch.Tensor:
        """Run one forward.

        After an exception the stored data of these requests is invalid.

        Args:
            tokens: New tokens of each request, the same number for each.
            assignment: Tiers of each layer of each request.

        Returns:
            Logits of each request's last token, (R, vocabulary) float32.
        """
        new = {request: len(token) for request, token in tokens.items()}
        ids = torch.tensor(list(tokens.values()), device=self.kv.device)
        past = torch.tensor([self.kv.tokens(request) for request in tokens], device=self.kv.device)
        positions = past[:, None] + torch.arange(ids.shape[1], device=self.kv.device)
        rows = _Rows(self.kv, self._windows, new, self._latents)
        arguments = self._more | ({"position_ids": positions} if self._positions else {})
        with self.kv.iteration(new, assignment):
            out, _ = forward_on(self.model, rows, input_ids=ids, return_dict=True, **arguments)
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits


def _kinds_of_rope(config: Any) -> str:
    """Rotary embedding parameters of a config, as text."""
    return str(getattr(config.get_text_config(decoder=True), "rope_parameters", ""))


@contextmanager
def in_rows(model: PreTrainedModel) -> Iterator[None]:
    """Make a model attend by rows until the block ends, then restore it."""
    check_not_attached(model)
    AttentionInterface.register(IMPLEMENTATION, row_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_of)  # for plain forwards: rows need no mask
    with with_forward(model), use_attention_interface(model, IMPLEMENTATION, row_attention):
        yield


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface function for rows.

    Args:
        module: The attention module.
        query: (R, q_heads, new, d).
        key, value: New tokens, (R, kv_heads, new, ...); with latent attention both are the cached rows.
        attention_mask: Ignored for rows.
        scaling: Factor of the logits; None: 1 / sqrt(d).
        **kwargs: Logit terms of the model.

    Returns:
        Output (R, new, q_heads, d of V), and None.
    """
    layer: _Layer | None = getattr(key, "csd_rows", None)
    if layer is None:
        return attend_on_device(module, query, key, value, attention_mask, kwargs | {"scaling": scaling}), None
    check_asked(module, kwargs, ("position_bias",) if layer.window else ("position_bias", "sliding_window"))
    terms = {name: kwargs.get(name) for name in TERMS}
    terms["scaling"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    if layer.window:
        return _in_windows(layer, module, query, k, v, terms).transpose(1, 2), None
    if layer.cache.whole_prompts:
        return _prefill(layer, module, query, key, value, terms), None
    latent = layer.latent_space(module, key)
    if latent is None or not layer.cache.kv.drives:
        return _in_tiers(layer, module, query, k, v, terms).transpose(1, 2), None
    # Drives attend in latent space. So does the device, so that tokens do not depend on the tier.
    out = _in_tiers(layer, module, latent.queries(query), k, v, terms)
    return latent.outputs(out.transpose(1, 2)), None


def _in_windows(
    layer: _Layer,
    module: torch.nn.Module,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: dict[str, Any],
) -> torch.Tensor:
    """Attend each row to its window, and keep the tokens that the next token sees."""
    windows, out = layer.cache.kv.windows, []
    for row, request in enumerate(layer.cache.numbers):
        key = request, layer.number
        before = windows.get(key, (k[row, :0], v[row, :0]))
        keys, values = torch.cat([before[0], k[row]]), torch.cat([before[1], v[row]])
        out.append(_attend_row(module, query[row], *_expanded(layer, module, keys, values), terms, layer.window))
        visible = slice(max(0, len(keys) - layer.window + 1), None)
        windows[key] = keys[visible].clone(), values[visible].clone()
    return torch.stack(out)


def _prefill(
    layer: _Layer,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: dict[str, Any],
) -> torch.Tensor:
    """Attend whole prompts to themselves as the model does, in its own precision, and store their keys and values.

    Args:
        layer: Layer of the forward.
        module: The model's attention.
        query: Queries (R, q_heads, new, d).
        key, value: Keys and values, (R, kv_heads, new, ...).
        terms: Scaling and terms of the model's attention.

    Returns:
        Output (R, new, q_heads, d of V).
    """
    kv, numbers = layer.cache.kv, layer.cache.numbers
    new = _stored(kv, key.transpose(1, 2), value.transpose(1, 2))
    for attention in kv.enter_rows(layer.number, len(numbers)):
        for request in attention.rows:
            _append(kv, attention, request, *(states[numbers[request]] for states in new))
    if kv.drives:
        set_logit_terms(kv.drives.driver, layer.number, query, terms)
    latent = layer.latent_space(module, key)
    keys, values = (key, value) if latent is None else latent.expand(key)
    return attend_on_device(module, query, keys, values, None, terms)


def _stored(kv: KvTable, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New keys and values, (R, new, kv_heads, ...), as every tier stores them."""
    return kv.format.stored(k), kv.format.stored(v[..., : kv.format.v_channels] if kv.format.latent else v)


def _append(
    kv: KvTable, attention: AttendCall, request: Hashable, k: torch.Tensor, v: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Store new keys and values of a request, (new, kv_heads, ...), on the device; returns those of all its blocks."""
    blocks = [kv.stored(block) for block in kv.blocks(request, attention.layer)]
    for stored, rows in zip(blocks[-1], (k, v), strict=True):
        stored[-len(rows) :] = rows
    return blocks


def _in_tiers(
    layer: _Layer,
    module: torch.nn.Module,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: dict[str, Any],
) -> torch.Tensor:
    """Attend each row in its tier, to its KV data as stored there.

    Args:
        layer: Layer of the forward.
        module: The model's attention.
        query: Queries (R, q_heads, new, d).
        k: New keys (R, new, kv_heads, d).
        v: New values (R, new, kv_heads, d of V); with latent attention the keys.
        terms: Scaling and terms of the model's attention.

    Returns:
        Output (R, q_heads, new, d of V).
    """
    kv, numbers, dtype = layer.cache.kv, layer.cache.numbers, query.dtype
    k, v = _stored(kv, k, v)
    if kv.drives:
        query, terms = _as_drives(kv, layer.number, query, terms)
    out: dict[int, torch.Tensor] = {}
    for attention in kv.enter_rows(layer.number, len(numbers)):
        rows = [numbers[request] for request in attention.rows]
        if CSD in attention.tiers:
            outputs = _in_drives(kv, attention, query[rows], k[rows], v[rows], terms)
        else:
            outputs = _on_device(layer, attention, module, query[rows], (k[rows], v[rows]), terms)
        out |= dict(zip(rows, outputs, strict=True))
    return torch.stack([out[row] for row in range(len(numbers))]).to(dtype)


def _as_drives(
    kv: KvTable, layer: int, query: torch.Tensor, terms: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Queries as sent to drives, and the remaining scaling.

    Drives divide by sqrt(d) unless they know a layer's own scale; any other factor is applied to the queries. On the
    device, rounded queries attend in at least FP32, as in drives.
    """
    assert kv.drives
    set_logit_terms(kv.drives.driver, layer, query, terms)
    factor = 1.0 if layer in kv.drives.driver.terms else terms["scaling"] * query.shape[-1] ** 0.5
    query = kv.format.rounded(query * factor).to(torch.promote_types(query.dtype, torch.float32))
    return query, terms | {"scaling": terms["scaling"] / factor}


def _on_device(
    layer: _Layer,
    attention: AttendCall,
    module: torch.nn.Module,
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    terms: dict[str, Any],
) -> torch.Tensor:
    """Store new keys and values (R, new, kv_heads, ...) and attend each row separately; q (R, q_heads, new, d)."""
    kv, out = layer.cache.kv, []
    for number, request in enumerate(attention.rows):
        blocks = _append(kv, attention, request, *(rows[number] for rows in new))
        k, v = (_joined(pieces).to(q.dtype) for pieces in zip(*blocks, strict=True))
        if not kv.drives:
            k, v = _expanded(layer, module, k, v)
        out.append(_attend_row(module, q[number], k, k if kv.format.latent and kv.drives else v, terms))
    outputs = torch.stack(out)
    return outputs.to(kv.format.value_dtype) if kv.drives else outputs


def _joined(blocks: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Concatenate consecutive blocks of rows."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _expanded(
    layer: _Layer, module: torch.nn.Module, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each head, (S, heads, ...), from the cached rows of a layer, (S, kv_heads, ...)."""
    latent = layer.latent_space(module, k)
    if latent is None:
        return k, v
    keys, values = latent.expand(k.transpose(0, 1)[None])
    return keys[0].transpose(0, 1), values[0].transpose(0, 1)


def _attend_row(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: dict[str, Any],
    window: int = 0,
) -> torch.Tensor:
    """Attend a row's last tokens to its keys and values.

    Args:
        module: The attention module.
        q: Queries, (q_heads, new, d).
        k, v: All keys and values, (S, kv_heads, ...) each.
        terms: Scaling and terms of the model's attention.
        window: Length of the sliding window, tokens; 0: full attention.

    Returns:
        Output (q_heads, new, d of V).
    """
    k, v = (states.to(q.dtype).transpose(0, 1)[None] for states in (k, v))
    count, tokens, mask = q.shape[1], k.shape[2], None
    if count > 1:
        mask = torch.ones(1, 1, count, tokens, dtype=torch.bool, device=q.device).tril(tokens - count)
        if window:
            mask = mask.triu(tokens - count - window + 1)
    if all(terms[name] is None for name in TERMS):
        return scaled_dot_product_attention(q[None], k, v, mask, scale=terms["scaling"], enable_gqa=True)[0]
    return attend_on_device(module, q[None], k, v, mask, terms)[0].transpose(0, 1)


def _in_drives(
    kv: KvTable, attention: AttendCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: dict[str, Any]
) -> torch.Tensor:
    """Store new keys and values (R, 1, kv_heads, ...) in drives and attend there; earlier blocks on the device.

    q (R, q_heads, 1, d) is as sent to drives. Both results are merged.
    """
    assert kv.drives
    bf16 = kv.format.value_dtype is torch.bfloat16
    staged: tuple[F16, ...] = stage(q[:, :, 0], k[:, 0], v[:, 0], bf16=bf16)()
    block = len(attention.tiers) - 1
    out, sums = kv.drives.attend(attention.rows, block, attention.layer, *staged)
    outputs = unstage(out, q, bf16)
    if block:
        parts = [
            _part(kv, request, attention.layer, row, terms) for request, row in zip(attention.rows, q, strict=True)
        ]
        before, weights = (np.stack(arrays) for arrays in zip(*parts, strict=True))
        merged, _ = merge([before, outputs.float().cpu().numpy()], [weights, sums])
        outputs = torch.from_numpy(merged).to(q.device, kv.format.value_dtype)
    return outputs.unsqueeze(2)


def _part(kv: KvTable, request: Hashable, layer: int, q: torch.Tensor, terms: dict[str, Any]) -> tuple[F32, F32]:
    """Attention of a row, q (q_heads, 1, d), to its blocks on the device.

    An attention sink is counted by the drives, which have the last block, and not here.

    Returns:
        Output (q_heads, d of V), and m and l, (q_heads, 2).
    """
    blocks = [kv.stored(block) for block in kv.blocks(request, layer)[:-1]]
    keys, values = (_joined(pieces).float() for pieces in zip(*blocks, strict=True))
    group, tokens = q.shape[0] // keys.shape[1], len(keys)
    # (q_heads, tokens, ...) each
    k, v = (
        states.transpose(0, 1).repeat_interleave(group, dim=0)
        for states in (keys, keys if kv.format.latent else values)
    )
    behind = kv.tokens(request, layer) - 1 - torch.arange(tokens, device=q.device)
    logits = apply_cap_and_bias(q.float() @ k.transpose(1, 2) * terms["scaling"], behind[None], terms)[:, 0]
    m = logits.max(dim=1, keepdim=True).values
    weights = (logits - m).exp()
    l = weights.sum(dim=1, keepdim=True)  # noqa: E741 - name in the interface
    out = (weights[:, None] @ v)[:, 0] / l
    return out.cpu().numpy(), torch.cat([m, l], dim=1).cpu().numpy()
