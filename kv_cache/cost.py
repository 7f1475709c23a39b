"""What a step takes, from how many tokens its requests have: fitted lines, as OrbitFlow's profile has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from csd_spec.checked import value
from kv_cache.planner.problem import BLOCK_TOKENS, StepCosts
from kv_cache.trace import Request

Seconds = Field(ge=0, le=1e3)


@value
class Drives:
    """Drives that attend, K and V of every head spread over all of them.

    bytes_per_s: at which all of them together read and attend. token_bytes: that they read of a token in a layer.
    call_s: of a layer, whatever is attended.
    """

    bytes_per_s: float = Field(gt=0)
    token_bytes: float = Field(gt=0)
    call_s: float = Seconds


@value
class Engine:
    """A model on a device with a link to the host.

    A decode step computes for step_s + token_s for each token of its requests. All layers of a request come over the
    link in fetch_s + fetch_token_s for each of its tokens. room_blocks: of a layer, that the device holds where all
    layers stay. prefill_tokens_per_s: of what does not depend on a prompt's length; prefill_pair_s: each token's share
    of attending to one before it. token_bytes: K and V of a token in a layer.
    """

    name: str
    layers: int = Field(ge=1, le=1000)
    step_s: float = Seconds
    token_s: float = Seconds
    fetch_s: float = Seconds
    fetch_token_s: float = Seconds
    room_blocks: int = Field(ge=1)
    prefill_tokens_per_s: float = Field(gt=0)
    prefill_pair_s: float = Field(default=0, ge=0, le=1)
    token_bytes: float = Field(default=4096, gt=0)
    drives: Drives | None = None

    def costs(self, tokens: Sequence[int], grown: int = 0) -> StepCosts:
        """Of a step of requests that have so many tokens each. grown: how many more there is to be room for."""
        each = np.array(tokens, np.int64)
        L = self.layers
        attend = None
        if self.drives:  # the device does not attend to them meanwhile
            read_s = each * self.drives.token_bytes / self.drives.bytes_per_s
            attend = read_s + self.drives.call_s / max(1, each.size) - each * self.token_s / L
        return StepCosts(
            compute=np.full(L, self.compute_s(int(each.sum())) / L),
            fetch=(each * self.fetch_token_s + self.fetch_s) / L,
            blocks=-(-(each + grown) // BLOCK_TOKENS),
            room=self.room_blocks * L,
            attend=attend,
        )

    @property
    def longest_tokens(self) -> int:
        """Of one request for which there is room, with every second layer away."""
        return self.room_blocks * self.layers // (self.layers - self.layers // 2 + 1) * BLOCK_TOKENS

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError for a request that there never is room for."""
        for each in requests:
            if each.tokens > self.longest_tokens:
                raise ValueError(
                    f"request {each.number}: {each.tokens:,} tokens, {self.name} has room for {self.longest_tokens:,}"
                )

    @property
    def line(self) -> tuple[float, float, float, float, float, float, float]:
        """What `costs` follows from: step_s, token_s, fetch_s, fetch_token_s; of drives call_s and seconds a token in a
        layer; and tokens of a block."""
        drives = self.drives
        in_drives = (drives.call_s, drives.token_bytes / drives.bytes_per_s) if drives else (0.0, 0.0)
        return self.step_s, self.token_s, self.fetch_s, self.fetch_token_s, *in_drives, float(BLOCK_TOKENS)

    def compute_s(self, tokens: int) -> float:
        """Of a step with so many tokens in all, none of which lie away."""
        return self.step_s + self.token_s * tokens

    def prefill_s(self, until: int, since: int = 0) -> float:
        """Of the tokens of a prompt from one on, up to another."""
        pairs = (until * until - since * since) / 2
        return (until - since) / self.prefill_tokens_per_s + pairs * self.prefill_pair_s

    def slo_s(self, scale: float) -> float:
        """OrbitFlow's objective: the step of the longest request that fits the device, times a scale."""
        return scale * self.compute_s(self.room_blocks * BLOCK_TOKENS)
