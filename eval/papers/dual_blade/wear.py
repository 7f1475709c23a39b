"""Write amplification of contexts that are created and freed: Dual-Blade's extents on a small drive of this project."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl, Nand

TENSORS, PROMPT, STEPS, CONTEXTS = 64, 64, 4, 8  # a tensor's tokens are pages here
FILL = 0.75  # of the drive, by one context


def waf() -> float:
    """Pages programmed over pages of data, of several contexts that fill most of a drive, one after the other.

    A context writes each tensor of its prompt, then a row of each tensor at each step, and discards all in the end.
    """
    stored = TENSORS * (PROMPT + STEPS)
    geometry = replace(
        INSTCSD_ZYNQ7045_8CH.geometry, channels=2, dies_per_channel=1, planes_per_die=1, pages_per_block=16
    )
    blocks = int(stored / FILL / (geometry.channels * geometry.pages_per_block))
    spec = replace(INSTCSD_ZYNQ7045_8CH, geometry=replace(geometry, blocks_per_plane=blocks))
    ftl = Ftl(spec, Nand(spec.geometry))
    ftl.blocks.resize(stored)
    starts = np.arange(TENSORS) * (PROMPT + STEPS)
    for _ in range(CONTEXTS):
        for start in starts:
            _write(ftl, np.arange(start, start + PROMPT))
        for step in range(PROMPT, PROMPT + STEPS):
            for start in starts:
                _write(ftl, np.array([start + step]))
        ftl.blocks.discard(0, stored)
    return ftl.counters.waf


def _write(ftl: Ftl, pages: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    data = np.zeros((pages.size, ftl.spec.geometry.page_bytes), np.uint8)
    ftl.blocks.write(pages, data, ftl.timing.idle_ns())
