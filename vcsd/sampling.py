"""Sampling of the next token of a request from logits: greedy, or random with a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from csd_spec.checked import frozen_value

MAX_LOGPROBS = 20
LEAST = 1e-4  # lowest temperature above 0; below it logits overflow, and the result is greedy


@frozen_value
class SamplingParams:
    """Sampling parameters. temperature 0: greedy. top_k 0: all tokens. The seed makes a request reproducible.

    logprobs: number of most probable tokens to keep for each token, with log-probabilities; None: compute none.
    """

    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, of the model's logits before temperature, top_k and top_p.

    Attributes:
        logprob: Log-probability of the token that was sampled.
        top: The most probable tokens and their log-probabilities, in descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Samples the tokens of one request."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._greedy, self._logprobs = sampling.temperature == 0, sampling.logprobs
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._warp = LogitsProcessorList()
        if not self._greedy:
            self._warp.append(TemperatureLogitsWarper(max(sampling.temperature, LEAST)))
            if sampling.top_k:
                self._warp.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warp.append(TopPLogitsWarper(sampling.top_p))

    def next(self, logits: torch.Tensor, before: list[int]) -> int:
        """Sample the next token from its logits (vocabulary,) float32 and the tokens before it."""
        if self._greedy:
            return int(logits.argmax())
        warped = self._warp(torch.tensor([before], device="cpu"), logits.cpu()[None])
        return int(torch.multinomial(warped.softmax(dim=-1)[0], 1, generator=self._generator))

    def logprobs(self, logits: torch.Tensor, token: int) -> list[TokenLogprob]:
        """Log-probabilities of a sampled token from the logits (vocabulary,); empty if none are asked for."""
        if self._logprobs is None:
            return []
        logprobs = logits.float().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(self._logprobs, len(logprobs)))
        return [TokenLogprob(float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))]
