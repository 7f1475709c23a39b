"""Where the pages of a drive are while it has power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["memory", "mapped", "direct"]
KINDS: tuple[Kind, ...] = ("memory", "mapped", "direct")
BLOCK = 4096  # what direct I/O and the kernel's pages are made of


@dataclass(frozen=True, slots=True)
class Medium:
    """kind: `memory` holds all pages; `mapped` leaves that to the kernel's page cache, and asks it for the pages of a
    plan; `direct` reads those past it and keeps `cache_bytes` of those that are asked for most often, besides what a
    command reads."""

    kind: Kind = "memory"
    cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"medium = {self.kind!r}: must be one of {', '.join(KINDS)}")
        if self.cache_bytes < BLOCK:
            raise ValueError(f"cache_bytes = {self.cache_bytes}: at least {BLOCK} are needed")


IN_MEMORY = Medium()
