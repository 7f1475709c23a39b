"""What serves: rooms of tiers, rates of links, and what an iteration takes."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import IntEnum

from pydantic import Field

from csd_spec.checked import value


class Tier(IntEnum):
    """Where K and V of a request are, the nearest first."""

    DEVICE = 0
    HOST = 1
    FLASH = 2


@value
class Machine:
    """A model on a device with two links: to host memory, and from there to flash. Each carries one copy at a time.

    token_bytes: K and V of a token in all layers. host_start_s, flash_start_s: what a copy takes without its bytes. An
    iteration computes for step_s, and reads K and V of its requests at kv_bytes_per_s.
    """

    token_bytes: int = Field(ge=1)
    block_tokens: int = Field(default=16, ge=1)
    device_bytes: int = Field(ge=1)
    host_bytes: int = Field(ge=1)
    flash_bytes: int = Field(ge=1)
    host_bytes_per_s: float = Field(gt=0)
    host_start_s: float = Field(default=0, ge=0)
    flash_bytes_per_s: float = Field(gt=0)
    flash_start_s: float = Field(default=0, ge=0)
    step_s: float = Field(gt=0)
    kv_bytes_per_s: float = Field(gt=0)
    prefill_tokens_per_s: float = Field(gt=0)

    def bytes_of(self, tokens: int) -> int:
        """Whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens * self.token_bytes

    def rooms(self) -> list[int]:
        """By tier."""
        return [self.device_bytes, self.host_bytes, self.flash_bytes]

    def copy_s(self, by: Tier, size: int) -> float:
        """A copy over the link that leads to a tier."""
        if by is Tier.HOST:
            return self.host_start_s + size / self.host_bytes_per_s
        return self.flash_start_s + size / self.flash_bytes_per_s

    def prefill_s(self, tokens: int) -> float:
        """Computing K and V of so many."""
        return tokens / self.prefill_tokens_per_s

    def iteration_s(self, tokens: int, prefilled: int) -> float:
        """Of requests with so many tokens in all, and with so many to prefill before."""
        return self.step_s + tokens * self.token_bytes / self.kv_bytes_per_s + self.prefill_s(prefilled)

    def without_copies(self) -> Machine:
        """The same where copies take no time."""
        fast = math.nextafter(math.inf, 0)
        return replace(self, host_bytes_per_s=fast, flash_bytes_per_s=fast, host_start_s=0.0, flash_start_s=0.0)
