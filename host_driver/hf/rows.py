"""A model of transformers whose forward takes requests of different lengths, whose K and V lie in different tiers.

Each row attends by itself, to K and V as they are stored, so a request's tokens are what they are without the others.
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
from csd_spec.arrays import F32
from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.attention import TERMS, check_asked, mask_of, tell
from host_driver.hf.cache import IMPLEMENTATION as DRIVES
from host_driver.hf.device import attend_on_device, bend
from host_driver.hf.forward import asking, check_free
from host_driver.hf.latent import latent_modules
from host_driver.hf.shape import FULL, SLIDING, Unsupported, placement
from host_driver.rows import RowKv
from kv_cache.carry_out import Homes
from kv_cache.hardware import CSD
from kv_cache.transfer.engine import AttendCall

_BY_LONGEST = ("longrope", "dynamic")
IMPLEMENTATION = f"{DRIVES}-rows"


class _Layer(CacheLayerMixin):
    """One layer of what a forward is given in place of a cache: marks keys, so that attention finds their rows.

    window: tokens that it attends to, 0 for all. number: of the model's windows, or of the layers in tiers.
    """

    is_croppable = False

    def __init__(self, cache: _Rows, number: int, window: int) -> None:
        super().__init__()
        self.cache, self.number, self.window, self.is_initialized = cache, number, window, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = key_states.view(key_states.shape)  # an object of its own
        keys.csd_rows = self  # type: ignore[attr-defined]  # read back by attention
        return keys, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return -1


class _Rows(Cache):
    """The rows of one forward. windows: of each layer of the model, 0 where it has none. new: tokens that each request
    gets, in the order of the batch."""

    def __init__(self, kv: RowKv, windows: Sequence[int], new: Mapping[Hashable, int]) -> None:
        full, bounded = itertools.count(), itertools.count()
        layers = [_Layer(self, next(bounded if window else full), window) for window in windows]
        super().__init__(layers=layers)
        self.kv = kv
        self.numbers = {request: number for number, request in enumerate(new)}
        self.longest = max(map(kv.tokens, new))


class RowModel:
    """A model, and K and V of its requests."""

    def __init__(self, model: PreTrainedModel, kv: RowKv) -> None:
        self.model, self.kv = model, kv
        takes, name = inspect.signature(model.forward).parameters, type(model).__name__
        self._more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._positions = "position_ids" in takes
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        if kind := next((kind for kind in _BY_LONGEST if kind in _kinds_of_rope(model.config)), None):
            raise Unsupported(f"{name} iterations positions by the longest of a batch (rope of kind {kind})")
        if latent_modules(model):
            raise Unsupported(f"{name} expands what it caches to K and V, which rows do not do")
        adapter = ADAPTERS.get(model.config.get_text_config(decoder=True).model_type)
        if not self._positions and not (adapter and adapter.by_distance):
            raise Unsupported(f"{name} takes no position_ids: requests of different lengths need them")
        placed = placement(model)
        if other := sorted(set(placed.kinds) - {FULL, SLIDING}):
            raise Unsupported(f"{name} has layers of kind {', '.join(other)}: rows have full attention and windows")
        if placed.shape.v_head_dim:
            raise Unsupported(f"{name} has V of other channels than K, which move as one in rows")
        windows = iter(placed.windows)
        self._windows = [0 if kind == FULL else next(windows).tokens for kind in placed.kinds]

    @torch.inference_mode()
    def forward(self, tokens: Mapping[Hashable, Sequence[int]], homes: Homes) -> torch.Tensor:
        """Logits of each request's last token, (R, vocabulary) float32. tokens: equally many for each.

        If it raises, what these requests have stored is of no use any more.
        """
        new = {request: len(each) for request, each in tokens.items()}
        ids = torch.tensor(list(tokens.values()), device=self.kv.device)
        past = torch.tensor([self.kv.tokens(request) for request in tokens], device=self.kv.device)
        positions = past[:, None] + torch.arange(ids.shape[1], device=self.kv.device)
        rows = _Rows(self.kv, self._windows, new)
        given = self._more | ({"position_ids": positions} if self._positions else {})
        with self.kv.iteration(new, homes):
            out = self.model(
                input_ids=ids,
                past_key_values=rows,
                use_cache=True,
                return_dict=True,
                **given,
            )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits


def _kinds_of_rope(config: Any) -> str:
    """What a config says of rotary embeddings."""
    return str(getattr(config.get_text_config(decoder=True), "rope_parameters", ""))


@contextmanager
def in_rows(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend so until the block ends, then put it back as it was."""
    check_free(model)
    AttentionInterface.register(IMPLEMENTATION, row_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_of)  # for forwards that are not ours: rows need none
    compiled = model._compiled_call_impl
    model._compiled_call_impl = None
    try:
        with asking(model, IMPLEMENTATION, row_attention):
            yield
    finally:
        model._compiled_call_impl = compiled


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The AttentionInterface function: query (R, q_heads, new, d), key and value (R, kv_heads, new, d) of the new
    tokens; returns (R, new, q_heads, d)."""
    layer: _Layer | None = getattr(key, "csd_rows", None)
    if layer is None:
        return attend_on_device(module, query, key, value, attention_mask, kwargs | {"scaling": scaling}), None
    check_asked(module, kwargs, ("position_bias",) if layer.window else ("position_bias", "sliding_window"))
    asked = {name: kwargs.get(name) for name in TERMS}
    asked["scaling"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    new = torch.stack([key, value], dim=1).permute(0, 3, 1, 2, 4)  # (R, new, 2, kv_heads, d)
    attend = _in_windows if layer.window else _in_places
    return attend(layer, module, query, new, asked).transpose(1, 2), None


def _in_windows(
    layer: _Layer, module: torch.nn.Module, query: torch.Tensor, new: torch.Tensor, asked: dict[str, Any]
) -> torch.Tensor:
    """Attend each row to what its window holds, and keep of that what the next token sees."""
    windows, out = layer.cache.kv.windows, torch.empty_like(query)
    for row, request in enumerate(layer.cache.numbers):
        key = request, layer.number
        rows = torch.cat([windows[key], new[row]]) if key in windows else new[row]
        out[row] = _alone(module, query[row], rows, asked, layer.window)
        windows[key] = rows[max(0, len(rows) - layer.window + 1) :].clone()
    return out


def _in_places(
    layer: _Layer, module: torch.nn.Module, query: torch.Tensor, new: torch.Tensor, asked: dict[str, Any]
) -> torch.Tensor:
    """Attend each row where it lies, to K and V as they are stored there."""
    kv, numbers = layer.cache.kv, layer.cache.numbers
    new = new.to(kv.dtype)
    if kv.drives:
        query = query.half().to(query.dtype)
        tell(kv.drives.driver, layer.number, query, asked)
    out = torch.empty_like(query)
    for attention in kv.reach(layer.number, len(numbers)):
        rows = [numbers[request] for request in attention.rows]
        if CSD in attention.tiers:
            out[rows] = _in_drives(kv, attention, query[rows], new[rows], asked)
        else:
            out[rows] = _on_device(kv, attention, module, query[rows], new[rows], asked)
    return out


def _on_device(
    kv: RowKv, attention: AttendCall, module: torch.nn.Module, q: torch.Tensor, new: torch.Tensor, asked: dict[str, Any]
) -> torch.Tensor:
    """Store new (R, new, 2, H, d) and attend each row by itself, q (R, q_heads, new, d)."""
    out, count = torch.empty_like(q), q.shape[2]
    for number, request in enumerate(attention.rows):
        blocks = [kv.stored(block) for block in kv.blocks(request, attention.layer)]
        blocks[-1][-count:] = new[number]
        out[number] = _alone(module, q[number], torch.cat(blocks), asked)
    return out.half().to(q.dtype) if kv.drives else out


def _alone(
    module: torch.nn.Module, q: torch.Tensor, rows: torch.Tensor, asked: dict[str, Any], window: int = 0
) -> torch.Tensor:
    """Attention of a row's last tokens, q (q_heads, new, d), to its K and V (S, 2, H, d), or where there is a window to
    the last so many up to each; (q_heads, new, d)."""
    k, v = rows.to(q.dtype).permute(1, 2, 0, 3)[:, None]
    count, tokens, mask = q.shape[1], len(rows), None
    if count > 1:
        mask = torch.ones(1, 1, count, tokens, dtype=torch.bool, device=q.device).tril(tokens - count)
        if window:
            mask = mask.triu(tokens - count - window + 1)
    if all(asked[name] is None for name in TERMS):
        return scaled_dot_product_attention(q[None], k, v, mask, scale=asked["scaling"], enable_gqa=True)[0]
    return attend_on_device(module, q[None], k, v, mask, asked)[0].transpose(0, 1)


def _in_drives(
    kv: RowKv, attention: AttendCall, q: torch.Tensor, new: torch.Tensor, asked: dict[str, Any]
) -> torch.Tensor:
    """Store new (R, 1, 2, H, d) in drives and attend there, and on the device to blocks that lie before it; q
    (R, q_heads, 1, d)."""
    assert kv.drives
    # Drives divide by sqrt(d), but where they know a layer's own scale
    factor = 1.0 if attention.layer in kv.drives.driver.terms else asked["scaling"] * q.shape[-1] ** 0.5
    q16, kv16 = _halves(q[:, :, 0] * factor), _halves(new[:, 0])
    block = len(attention.tiers) - 1
    out, sums = kv.drives.attend(attention.rows, block, attention.layer, q16, kv16[:, 0], kv16[:, 1])
    if block:
        parts = [
            _part(kv, request, attention.layer, row, asked) for request, row in zip(attention.rows, q, strict=True)
        ]
        before, weights = (np.stack(each) for each in zip(*parts, strict=True))
        merged, _ = merge([before, out.astype(np.float32)], [weights, sums])
        out = merged.astype(np.float16)
    return torch.from_numpy(out).to(q.device, q.dtype).unsqueeze(2)


def _part(kv: RowKv, request: Hashable, layer: int, q: torch.Tensor, asked: dict[str, Any]) -> tuple[F32, F32]:
    """Attention of a row, q (q_heads, 1, d), to its blocks on the device: (q_heads, d), and m and l, (q_heads, 2).

    Drives count a sink, where the last block is, and so it is not counted here.
    """
    stored = torch.cat([kv.stored(block) for block in kv.blocks(request, layer)[:-1]]).float()
    group = q.shape[0] // stored.shape[2]
    k, v = stored.permute(1, 2, 0, 3).repeat_interleave(group, dim=1)  # each (q_heads, tokens, d)
    behind = kv.tokens(request, layer) - 1 - torch.arange(len(stored), device=q.device)
    logits = bend(q.float() @ k.transpose(1, 2) * asked["scaling"], behind[None], asked)[:, 0]
    m = logits.max(dim=1, keepdim=True).values
    weights = (logits - m).exp()
    l = weights.sum(dim=1, keepdim=True)  # noqa: E741 - the name of the interface
    out = (weights[:, None] @ v)[:, 0] / l
    return out.cpu().numpy(), torch.cat([m, l], dim=1).cpu().numpy()


def _halves(tensor: torch.Tensor) -> Any:
    return tensor.to(torch.float16).cpu().contiguous().numpy()
