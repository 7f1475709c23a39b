"""A reading under which TierKV's tables agree, and the same on a link that carries every byte once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean

DRAWS = 4000  # points of a distribution, of equal weight


@dataclass(frozen=True)
class Reading:
    """Iterations that compute for compute_ms and need copies of mean_ms.

    Copy times are normally distributed with a standard deviation of `spread` of the mean. A window of K iterations
    hides K times the compute time of one, in every iteration: windows of neighbours overlap, so the link is counted K
    times.
    """

    compute_ms: float
    mean_ms: float
    spread: float

    @cached_property
    def copies_ms(self) -> list[float]:
        """Copy times of iterations at the quantiles, ms."""
        if not self.mean_ms:
            return [0.0]
        normal = NormalDist(self.mean_ms, self.spread * self.mean_ms)
        return [max(0.0, normal.inv_cdf((at + 0.5) / DRAWS)) for at in range(DRAWS)]

    def tpot_ms(self, window: int) -> float:
        """Time per output token: compute, and the part of copies that the window does not hide, ms."""
        hidden = window * self.compute_ms
        return self.compute_ms + fmean(max(0.0, copy_ms - hidden) for copy_ms in self.copies_ms)

    def hits(self, window: int) -> float:
        """Fraction of copies that are complete when they are needed."""
        hidden = window * self.compute_ms
        return fmean(min(1.0, hidden / copy_ms) if copy_ms else 1.0 for copy_ms in self.copies_ms)

    def conserved_tpot_ms(self, window: int) -> float:
        """The same where the link carries one byte at a time: it gives an iteration no more than the iteration takes.

        A window of one overlaps an iteration with the next one's copies; a longer one evens them out too.
        """
        if window == 0:
            return self.compute_ms + fmean(self.copies_ms)
        if window == 1:
            return fmean(max(self.compute_ms, copy_ms) for copy_ms in self.copies_ms)
        return max(self.compute_ms, self.mean_ms)

    def conserved_hits(self, window: int) -> float:
        """The share of copies that the link can have carried under computing."""
        return min(1.0, self.compute_ms / self.mean_ms) if window and self.mean_ms else float(not self.mean_ms)
