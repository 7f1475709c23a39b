"""A batch of prompts, prefilled once on the host and once in drives; each method decodes from their last tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

import vcsd
from host_driver.hf.cache_argument import forward_on
from host_driver.hf.fill import can_fill, filled


class HostPrefill:
    """Prompts of which plain transformers caches, one each, hold all but the last token. No drive takes part."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[list[int]]) -> None:
        self.model, self.prompts = model, list(prompts)
        with _one_thread_each(model) as workers, ThreadPoolExecutor(workers, "prefill") as pool:
            self.caches = list(pool.map(lambda prompt: _prefilled(model, prompt[:-1]), self.prompts))

    def force(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities (tokens, vocabulary) before each of some tokens after a prompt, in one forward."""
        cache = self.caches[row]
        cache.activate_past_recording()  # window layers drop what they would need after the crop
        ids = torch.tensor([[self.prompts[row][-1], *tokens[:-1]]], device=self.model.device)
        out, _ = forward_on(self.model, cache, input_ids=ids)
        cache.crop(-ids.shape[1])
        return torch.log_softmax(out.logits[0].float(), -1)

    def in_drives(self, csd: vcsd.Session) -> Prefilled:
        """The same prompts in the drives that the model is attached to, with a forward where shipping cannot serve."""
        if can_fill(self.model, csd.placed):
            return Prefilled(self.model, self.prompts, filled(self.model, csd.kv, csd.placed, self.caches))
        return Prefilled(self.model, self.prompts)


@contextmanager
def _one_thread_each(model: PreTrainedModel) -> Iterator[int]:
    """Number of prompts to prefill concurrently, each by one thread of torch.

    On cores that other processes use too, threads that share one prompt wait for each other in every operation: two
    threads on two such cores needed three times the CPU time of one.
    """
    threads = torch.get_num_threads()
    if model.device.type != "cpu":
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _prefilled(model: PreTrainedModel, ids: list[int]) -> Cache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    keep = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
    forward_on(model, cache, input_ids=torch.tensor([ids], device=model.device), **keep)
    return cache


class Prefilled:
    """Prompts of which the drives of an attached model hold all but the last token."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], cache: Cache | None = None) -> None:
        """cache: holds all but the last tokens, padded on the left; None runs a forward."""
        self.model, self.cache = model, cache
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        self.mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        self.last = ids[:, -1:]
        self.extra = [name for name in ("position_ids", "logits_to_keep") if _takes(model, name)]
        if cache is None:
            self._forward(ids[:, :-1], self.mask[:, :-1])

    def decode(self, steps: int, choose: Callable[[int, torch.Tensor], torch.Tensor | None]) -> None:
        """Step on from the prompts' last tokens; afterwards the cache is as before.

        choose(step, logits (B, vocabulary)) gives the next tokens (B,), or None to end early.
        """
        ids, mask, stored = self.last, self.mask, 0
        assert self.cache is not None
        self.cache.activate_past_recording()  # as in `HostPrefill.force`
        for step in range(steps):
            logits = self._forward(ids, mask)
            stored += 1
            chosen = choose(step, logits)
            if chosen is None:
                break
            ids = chosen[:, None].to(mask.device)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        self.cache.crop(-stored)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"position_ids": positions, "logits_to_keep": 1}
        extra = {name: given[name] for name in self.extra}
        out, self.cache = forward_on(self.model, self.cache, input_ids=ids, attention_mask=mask, **extra)
        last: torch.Tensor = out.logits[:, -1].float()
        return last


def _takes(model: PreTrainedModel, name: str) -> bool:
    """Whether a model's forward has a parameter of this name, attached or not."""
    return name in inspect.signature(type(model).forward).parameters
