"""Forward of a transformers model over the requests of a server: rows of different lengths, in different tiers."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from host_driver.hf.adapters import ADAPTERS
from host_driver.hf.cache import RowCache
from host_driver.hf.cache_argument import forward_on
from host_driver.hf.forward import SERVING, check_not_attached, use_attention, with_forward
from host_driver.hf.latent import Latent
from host_driver.hf.shape import FULL, SLIDING, UnsupportedModelError, placement
from host_driver.kv_table import KvTable
from kv_cache.iteration import TierAssignment

_BY_LONGEST = ("longrope", "dynamic")


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
        self._latents: dict[torch.nn.Module, Latent | None] = {}
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
        rows = RowCache(self.kv, self._windows, list(tokens))
        rows.latents = self._latents
        arguments = self._more | ({"position_ids": positions} if self._positions else {})
        with self.kv.iteration(new, assignment) as rows.micro_batch:
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
    with with_forward(model), use_attention(model, SERVING):
        yield
