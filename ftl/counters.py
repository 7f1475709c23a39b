"""What the drive has done in its life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Pages programmed in the drive's life, by purpose (as far as a commit has recorded them), and commands' reads.

    groups: full groups of K, V and embedding-indexed K. levelled: the part of moved that evens wear out.
    cached: pages that the cache had. unrecovered: pages that the ECC gave up. host_reads, host_writes: commands that
    read, that stored something; refused: those that were not carried out; busy_ns: modelled time spent on commands.
    """

    groups: int = 0
    journal: int = 0
    moved: int = 0
    levelled: int = 0
    blocks: int = 0
    read: int = 0
    cached: int = 0
    unrecovered: int = 0
    host_reads: int = 0
    host_writes: int = 0
    refused: int = 0
    busy_ns: int = 0
    power_cycles: int = 0

    @property
    def data(self) -> int:
        """Pages that the host's data fills."""
        return self.groups + self.blocks

    @property
    def waf(self) -> float:
        """Pages programmed over pages that the host's data fills."""
        return (self.data + self.journal + self.moved) / self.data if self.data else 1.0
