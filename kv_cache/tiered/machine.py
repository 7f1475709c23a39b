"""What serves: rooms of tiers, rates of links, and what an iteration takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from kv_cache.cost import CostModel


class Tier(IntEnum):
    """Where K and V of a request are, the nearest first."""

    DEVICE = 0
    HOST = 1
    FLASH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model on a device with two links: to host memory, and from there to flash. Each carries one copy at a time.

    cost: seconds of compute. token_bytes: K and V of a token in all layers. host_start_s, flash_start_s: what a copy
    takes without its bytes.
    """

    cost: CostModel
    token_bytes: int
    block_tokens: int = 16
    device_bytes: int
    host_bytes: int
    flash_bytes: int
    host_bytes_per_s: float
    host_start_s: float = 0.0
    flash_bytes_per_s: float
    flash_start_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("token_bytes", "block_tokens", "device_bytes", "host_bytes", "flash_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("host_bytes_per_s", "flash_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")

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

    def iteration_s(self, tokens: Sequence[int], prefilled: Sequence[int]) -> float:
        """Of requests with so many tokens each, and with so many to prefill before."""
        prefill_s = sum(self.cost.prefill_s(each) for each in prefilled)
        return self.cost.decode_s(len(tokens), sum(tokens)) + prefill_s

    def without_copies(self) -> Machine:
        """The same where copies take no time."""
        fast = math.nextafter(math.inf, 0)
        return replace(self, host_bytes_per_s=fast, flash_bytes_per_s=fast, host_start_s=0.0, flash_start_s=0.0)
