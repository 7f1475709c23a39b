"""Log pages of a drive, with the key names of nvme-cli's JSON where NVMe has such a field."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftl import Ftl


def smart(ftl: Ftl) -> dict[str, Any]:
    """SMART / health information (NVMe Base Specification 2.0, figure 207). Data units are 1000 x 512 bytes."""
    c, nand, page = ftl.counters, ftl.nand, ftl.spec.geometry.page_bytes
    usable = ftl.spec.geometry.blocks - int(nand.bad.sum())
    spare = ftl.spec.geometry.blocks // 2
    return {
        "critical_warning": int(usable <= spare),
        "avail_spare": max(0, min(100, 100 * (usable - spare) // max(1, ftl.spec.geometry.blocks - spare))),
        "spare_thresh": 10,
        "percent_used": int(100 * nand.erase_count.mean() / nand.faults.endurance),
        "data_units_read": -(-c.read * page // 512_000),
        "data_units_written": -(-c.data * page // 512_000),
        "media_errors": c.unrecovered,
        "sequences": len(ftl.sequences),
        "waf": c.waf,
    }


def wear(ftl: Ftl) -> dict[str, Any]:
    """Vendor log page C0h: write amplification, erase histogram, bad blocks."""
    counts, c = ftl.nand.erase_count, ftl.counters
    values, blocks = np.unique(counts, return_counts=True)
    return {
        "waf": c.waf,
        "pages_groups": c.groups,
        "pages_blocks": c.blocks,
        "pages_journal": c.journal,
        "pages_moved": c.moved,
        "erase_min": int(counts.min()),
        "erase_max": int(counts.max()),
        "erase_mean": float(counts.mean()),
        "erase_histogram": {str(value): int(count) for value, count in zip(values, blocks, strict=True)},
        "bad_blocks": int(ftl.nand.bad.sum()),
        "free_blocks": ftl.placement.free_blocks,
    }
