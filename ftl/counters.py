"""Lifetime counters of a drive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Pages programmed over the drive's life, by purpose (up to the last commit), and commands carried out.

    Attributes:
        groups: Full groups of keys, values and embedding-indexed keys, pages.
        journal: Journal records, pages.
        moved: Pages moved by garbage collection and wear leveling.
        levelled: Pages moved by wear leveling; included in `moved`.
        blocks: Pages of the block namespace.
        read: Pages that a plan requested.
        cached: Pages that were hits in the drive's page cache.
        unrecovered: Pages that the ECC could not correct.
        host_reads: Commands that read data.
        host_writes: Commands that stored data.
        host_read_bytes: Bytes that these commands returned.
        host_written_bytes: Bytes that these commands brought.
        refused: Commands that were rejected.
        busy_ns: Simulated time spent on commands, ns.
        power_cycles: Number of power-ons.
        unsafe_shutdowns: Power-ons after which the drive was not closed.
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
    host_read_bytes: int = 0
    host_written_bytes: int = 0
    refused: int = 0
    busy_ns: int = 0
    power_cycles: int = 0
    unsafe_shutdowns: int = 0

    @property
    def data(self) -> int:
        """Pages filled by host data."""
        return self.groups + self.blocks

    @property
    def waf(self) -> float:
        """Write amplification: pages programmed / pages filled by host data; 1.0 before the first write."""
        return (self.data + self.journal + self.moved) / self.data if self.data else 1.0
