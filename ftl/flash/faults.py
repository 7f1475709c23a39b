"""What can go wrong in flash, as a plan that a seed makes repeatable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csd_spec.arrays import I64


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Rates of failure. The default is a drive without fault.

    factory_bad: share of blocks that are bad from the start. program_fail, erase_fail: share of operations after
    which the block is grown bad. raw_bit_errors: errors per bit of a read, growing by a factor of 1 + erases /
    endurance. A codeword with up to ecc_bits errors is corrected at once, with up to retry_bits after a second
    sensing, with more not at all.
    """

    seed: int = 0
    factory_bad: float = 0.0
    program_fail: float = 0.0
    erase_fail: float = 0.0
    raw_bit_errors: float = 0.0
    codeword_bytes: int = 1024
    ecc_bits: int = 40
    retry_bits: int = 72
    endurance: int = 3000

    def __post_init__(self) -> None:
        for name in ("factory_bad", "program_fail", "erase_fail", "raw_bit_errors"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} = {value}: must be a rate from 0 to below 1")
        if not 0 <= self.ecc_bits <= self.retry_bits:
            raise ValueError(f"retry_bits = {self.retry_bits}: must be at least ecc_bits = {self.ecc_bits}")

    def worst_codewords(self, generator: np.random.Generator, erases: I64, page_bytes: int) -> I64:
        """Bit errors of the worst codeword of each page read, (N,), given its block's erase count."""
        words = max(1, page_bytes // self.codeword_bytes)
        mean = self.raw_bit_errors * 8 * self.codeword_bytes * (1 + erases / self.endurance)
        worst: I64 = generator.poisson(mean[:, None], (erases.size, words)).max(axis=1)
        return worst
