"""Counts of pages shared by several sequences: always equal to a count over all sequences.

partner of: ftl/kv/share_counts.py
"""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest

from csd_spec import LAYOUTS, DriveSpec
from ftl import Ftl, FtlError


def looked_at(ftl: Ftl):  # type: ignore[no-untyped-def]
    """Number of other sequences that share each page."""
    counts = np.zeros(ftl.spec.geometry.pages, np.int64)
    for seq in ftl.sequences.values():
        for mapped in seq.maps.values():
            counts[mapped.flash_slots()] += 1
    return np.maximum(counts - 1, 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["fp16", "int4"])
def test_share_counts_hold_under_random_operations(small_drive: DriveSpec, seed: int, layout: str) -> None:
    draw, ftl = random.Random(seed), Ftl(small_drive)
    form, done = LAYOUTS[layout].form(512, 16, 256), 0
    generator = np.random.default_rng(seed)
    for _ in range(600):
        handles = [h for h, seq in ftl.sequences.items() if not seq.failed]
        try:
            match draw.choice(("create", "append", "append", "append", "fork", "fork", "crop", "free", "power")):
                case "create" if len(handles) < 3:
                    ftl.create(1, 2, 1, form)
                case "append" if handles:
                    rows = generator.standard_normal((draw.randint(1, 60), 1, 16)).astype(np.float16)
                    lengths = np.array([len(rows)])
                    ftl.append([draw.choice(handles)], draw.randrange(2), lengths, rows, rows, 0)
                case "fork" if 0 < len(handles) < 8:
                    ftl.fork(draw.choice(handles))
                case "crop" if handles:
                    ftl.crop(draw.choice(handles), draw.randrange(2), draw.randrange(90), 0)
                case "free" if len(handles) > 3:
                    ftl.free(handles[:1], 0)
                case "power" if draw.random() < 0.2:
                    ftl.flush(0)
                    ftl = Ftl(small_drive, ftl.nand)
            done += 1
        except FtlError:  # it is full
            with suppress(FtlError):
                ftl.free(handles[:1], 0)
        assert np.array_equal(ftl.kv.shared.others, looked_at(ftl))
    assert ftl.counters.moved > 0
    assert done > 100
