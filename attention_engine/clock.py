"""The engine's clock: cycles of each unit from the work it is given."""

from __future__ import annotations

from csd_spec import EngineSpec

_TOPK_PASSES = 3  # histogram, threshold, collect


class EngineClock:
    """Modelled time of one unit at work, in nanoseconds. All figures in cycles are rounded up.

    | unit | cycles |
    |---|---|
    | kernel | lines x ceil(length / lanes) x queries / kernel_efficiency |
    | softmax, behind a kernel | scores x queries / softmax_ways |
    | argtopk | 3 x values / topk_ways |
    | NFC filter, one on each channel | bytes / nfc_bytes_per_cycle, under the transfer: `DriveSpec.channel_timing` |
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def kernel_ns(self, beats: int) -> int:
        """One kernel for that many beats: lines x ceil(length / lanes) x queries."""
        return self._ns(-int(-beats // self.spec.kernel_efficiency))

    def softmax_ns(self, scores: int) -> int:
        """One kernel's softmax."""
        return self._ns(-(-scores // self.spec.softmax_ways))

    def topk_ns(self, values: int) -> int:
        """argtopk over `values` values."""
        return self._ns(-(-_TOPK_PASSES * values // self.spec.topk_ways))

    def _ns(self, cycles: int) -> int:
        return -(-cycles * 1_000_000_000 // self.spec.clock_hz)


def argtopk_cycles(keys: int, ways: int, digit: int = 10) -> int:
    """Cycles of the RTL's argtopk (`rtl/argtopk.sv`) from the last key to the last bit.

    Three passes over the keys; a scan of the bins of each of three digits, in two levels.
    """
    return 3 * -(-keys // ways) + 3 * (2 * 2 ** (digit // 2) + 9)
