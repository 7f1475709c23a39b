"""What is found wrong with an array."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Damage:
    """What reading an array has found wrong.

    corrected: how many pages, spare areas and blocks' entries had one wrong bit. pages: those that are not what their
    spare areas say. spares: pages with spare areas that say nothing any more; blocks: those with such entries. files:
    those that are missing or have another size.
    """

    corrected: int = 0
    pages: set[int] = field(default_factory=set)
    spares: set[int] = field(default_factory=set)
    files: list[str] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
