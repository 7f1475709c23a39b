"""What the drive has done in its life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Pages programmed in the drive's life, by purpose (as far as a commit has recorded them), and commands' reads.

    groups: full groups of K, V and embedding-indexed K. unrecovered: pages that the ECC gave up.
    """

    groups: int = 0
    journal: int = 0
    moved: int = 0
    blocks: int = 0
    read: int = 0
    unrecovered: int = 0

    @property
    def waf(self) -> float:
        """Pages programmed over pages that the host's data fills."""
        useful = self.groups + self.blocks
        return (useful + self.journal + self.moved) / useful if useful else 1.0
