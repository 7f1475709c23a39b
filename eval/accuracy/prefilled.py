"""A batch of prompts in drives, from whose last tokens methods decode in turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel


class Prefilled:
    """Prompts of which drives hold all but the last token."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]]) -> None:
        self.model = model
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        self.mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        self.last, self.cache = ids[:, -1:], None
        self.takes_positions = "position_ids" in model.forward.__wrapped__.__code__.co_varnames
        self._forward(ids[:, :-1], self.mask[:, :-1])

    def decode(self, steps: int, choose: Callable[[int, torch.Tensor], torch.Tensor | None]) -> None:
        """Step on from the prompts' last tokens; afterwards the cache is as before.

        choose(step, logits (B, vocabulary)) gives the next tokens (B,), or None to end early.
        """
        ids, mask, stored = self.last, self.mask, 0
        for step in range(steps):
            logits = self._forward(ids, mask)
            stored += 1
            chosen = choose(step, logits)
            if chosen is None:
                break
            ids = chosen[:, None].to(mask.device)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        assert self.cache is not None
        self.cache.crop(-stored)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        extra = {"position_ids": positions} if self.takes_positions else {}
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **extra)
        self.cache = out.past_key_values
        last: torch.Tensor = out.logits[:, -1].float()
        return last
