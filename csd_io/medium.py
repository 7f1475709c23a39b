"""Medium of a drive's pages while it is powered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["memory", "direct"]
KINDS: tuple[Kind, ...] = ("memory", "direct")
BLOCK = 4096  # alignment of direct I/O, and the kernel's page size


@dataclass(frozen=True, slots=True)
class Medium:
    """Storage of a drive's pages at run time.

    Attributes:
        kind: `memory` holds all pages in RAM; `direct` reads a drive's file with direct I/O and caches the most
            frequently read pages itself.
        cache_bytes: Size of the cache of `direct`, bytes, in addition to the pages of the current command.
    """

    kind: Kind = "memory"
    cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"medium = {self.kind!r}: must be one of {', '.join(KINDS)}")
        if self.cache_bytes < BLOCK:
            raise ValueError(f"cache_bytes = {self.cache_bytes}: must be at least {BLOCK}")


IN_MEMORY = Medium()
