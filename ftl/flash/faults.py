"""Fault injection: failure rates of the flash, reproducible by a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csd_spec.arrays import I64


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Failure rates. The default is a drive without faults.

    Attributes:
        seed: Random seed.
        factory_bad: Fraction of blocks that are bad from the start.
        program_fail: Fraction of program operations that fail; the block becomes bad.
        erase_fail: Fraction of erase operations that fail; the block becomes bad.
        raw_bit_errors: Bit errors per bit read; grows by a factor of 1 + erases / endurance.
        codeword_bytes: Bytes per ECC codeword.
        ecc_bits: Errors per codeword that are corrected without a retry.
        retry_bits: Errors per codeword that are corrected after one read retry; more are uncorrectable.
        endurance: P/E cycles after which the bit error rate has doubled.
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
                raise ValueError(f"{name} = {value}: must be a rate >= 0 and < 1")
        if not 0 <= self.ecc_bits <= self.retry_bits:
            raise ValueError(f"retry_bits = {self.retry_bits}: must be at least ecc_bits = {self.ecc_bits}")

    def worst_codewords(self, generator: np.random.Generator, erases: I64, page_bytes: int) -> I64:
        """Draw the bit errors of the worst codeword of each page read, (N,) int64, given its block's erase count."""
        words = max(1, page_bytes // self.codeword_bytes)
        mean = self.raw_bit_errors * 8 * self.codeword_bytes * (1 + erases / self.endurance)
        worst: I64 = generator.poisson(mean[:, None], (erases.size, words)).max(axis=1)
        return worst
