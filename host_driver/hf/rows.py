"""A model of transformers whose forward takes requests of different lengths, whose K and V lie in different places.

Each row attends by itself, to K and V as they are stored, so a request's tokens are what they are without the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attention_engine import merge
from csd_spec.arrays import F32
from host_driver.hf.attention import check_asked
from host_driver.hf.cache import IMPLEMENTATION as DRIVES
from host_driver.hf.forward import check_free
from host_driver.hf.latent import latent_modules
from host_driver.hf.shape import Unsupported
from host_driver.rows import RowKv
from residency.executor import Attention
from residency.machine import CSD
from residency.policies.placed import Homes

_BY_LONGEST = ("longrope", "dynamic")
IMPLEMENTATION = f"{DRIVES}-rows"


class _Layer(CacheLayerMixin):
    """One layer of what a forward is given in place of a cache: marks keys, so that attention finds their rows."""

    is_croppable = False

    def __init__(self, cache: _Rows, index: int) -> None:
        super().__init__()
        self.cache, self.index, self.is_initialized = cache, index, True

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
    """The rows of one forward. new: tokens that each request gets, in the order of the batch."""

    def __init__(self, kv: RowKv, new: Mapping[Hashable, int]) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(kv.shape.layers)])
        self.kv = kv
        self.numbers = {request: number for number, request in enumerate(new)}
        self.longest = max(map(kv.tokens, new))


class RowModel:
    """A model, and K and V of its requests."""

    def __init__(self, model: PreTrainedModel, kv: RowKv) -> None:
        self.model, self.kv = model, kv
        takes = inspect.signature(model.forward).parameters
        self._more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        if kind := next((kind for kind in _BY_LONGEST if kind in _kinds_of_rope(model.config)), None):
            raise Unsupported(f"{type(model).__name__} turns positions by the longest of a batch (rope of kind {kind})")
        if latent_modules(model):
            raise Unsupported(f"{type(model).__name__} expands what it caches to K and V, which rows do not do")
        if "position_ids" not in takes:
            raise Unsupported(f"{type(model).__name__} takes no position_ids: requests of different lengths need them")

    @torch.inference_mode()
    def forward(self, tokens: Mapping[Hashable, Sequence[int]], homes: Homes) -> torch.Tensor:
        """Logits of each request's last token, (R, vocabulary) float32. tokens: equally many for each.

        If it raises, what these requests have stored is of no use any more.
        """
        new = {request: len(each) for request, each in tokens.items()}
        ids = torch.tensor(list(tokens.values()), device=self.kv.device)
        past = torch.tensor([self.kv.tokens(request) for request in tokens], device=self.kv.device)
        positions = past[:, None] + torch.arange(ids.shape[1], device=self.kv.device)
        rows = _Rows(self.kv, new)
        with self.kv.turn(new, homes):
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=rows,
                use_cache=True,
                return_dict=True,
                **self._more,
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
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)  # for forwards that are not ours: rows need none
    before, compiled = model.config._attn_implementation, model._compiled_call_impl
    model._compiled_call_impl = None
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model._compiled_call_impl = compiled
        model.set_attn_implementation(before)


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
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out, None
    check_asked(module, kwargs)
    kv, numbers = layer.cache.kv, layer.cache.numbers
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    new = torch.stack([key, value], dim=1).permute(0, 3, 1, 2, 4).to(kv.dtype)  # (R, new, 2, kv_heads, d)
    if kv.drives:
        query = query.half().to(query.dtype)
    out = torch.empty_like(query)
    for attention in kv.reach(layer.index, len(numbers)):
        rows = [numbers[request] for request in attention.rows]
        attend = _in_drives if CSD in attention.places else _on_device
        out[rows] = attend(kv, attention, query[rows], new[rows], scale)
    return out.transpose(1, 2), None


def _on_device(kv: RowKv, attention: Attention, q: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
    """Store new (R, new, 2, H, d) and attend each row by itself, q (R, q_heads, new, d)."""
    out, count = torch.empty_like(q), q.shape[2]
    for number, request in enumerate(attention.rows):
        blocks = [kv.stored(extent) for extent in kv.blocks(request, attention.layer)]
        blocks[-1][-count:] = new[number]
        k, v = torch.cat(blocks).to(q.dtype).permute(1, 2, 0, 3)[:, None]
        mask = None
        if count > 1:
            mask = torch.ones(count, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - count)
        out[number] = scaled_dot_product_attention(q[number, None], k, v, mask, scale=scale, enable_gqa=True)[0]
    return out.half().to(q.dtype) if kv.drives else out


def _in_drives(kv: RowKv, attention: Attention, q: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
    """Store new (R, 1, 2, H, d) in drives and attend there, and on the device to blocks that lie before it; q
    (R, q_heads, 1, d)."""
    assert kv.drives
    q16, kv16 = _halves(q[:, :, 0] * scale * q.shape[-1] ** 0.5), _halves(new[:, 0])
    block = len(attention.places) - 1
    out, sums = kv.drives.attend(attention.rows, block, attention.layer, q16, kv16[:, 0], kv16[:, 1])
    if block:
        parts = [
            _part(kv, request, attention.layer, row, scale) for request, row in zip(attention.rows, q, strict=True)
        ]
        before, weights = (np.stack(each) for each in zip(*parts, strict=True))
        merged, _ = merge([before, out.astype(np.float32)], [weights, sums])
        out = merged.astype(np.float16)
    return torch.from_numpy(out).to(q.device, q.dtype).unsqueeze(2)


def _part(kv: RowKv, request: Hashable, layer: int, q: torch.Tensor, scale: float) -> tuple[F32, F32]:
    """Attention of a row, q (q_heads, 1, d), to its blocks on the device: (q_heads, d), and m and l, (q_heads, 2)."""
    stored = torch.cat([kv.stored(extent) for extent in kv.blocks(request, layer)[:-1]]).float()
    group = q.shape[0] // stored.shape[2]
    k, v = stored.permute(1, 2, 0, 3).repeat_interleave(group, dim=1)  # each (q_heads, tokens, d)
    logits = (q.float() @ k.transpose(1, 2))[:, 0] * scale
    m = logits.max(dim=1, keepdim=True).values
    weights = (logits - m).exp()
    l = weights.sum(dim=1, keepdim=True)  # noqa: E741 - the name of the interface
    out = (weights[:, None] @ v)[:, 0] / l
    return out.cpu().numpy(), torch.cat([m, l], dim=1).cpu().numpy()


def _halves(tensor: torch.Tensor) -> Any:
    return tensor.to(torch.float16).cpu().contiguous().numpy()
