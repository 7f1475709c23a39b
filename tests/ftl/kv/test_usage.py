"""Space used by sequences is counted as it changes: equal to a count over their maps.

partner of: ftl/kv/relayout.py
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS, DriveSpec
from ftl import Ftl, OutOfSpaceError
from ftl.kv.layouts import maps_of
from ftl.kv.usage import Usage, table_bytes

LAYOUT = LAYOUTS["fp16"].paged(512, 8, 4)
LAYERS, HEADS = 2, 2


def counted(ftl: Ftl) -> dict[int, Usage]:
    """By label, from slots, buffers and lengths."""
    usage: dict[int, Usage] = defaultdict(Usage)
    for seq in ftl.sequences.values():
        use = Usage(1, table_bytes(seq.layers, seq.heads, seq.layout))
        use.pages = sum(mapped.flash_slots().size for mapped in seq.maps.values())
        use.buffers = sum(int((mapped.buffers >= 0).sum()) for mapped in seq.primary.values())
        use.tails = 2 * seq.heads * int((seq.lengths > 0).sum()) * (seq.layout.n > 1)
        usage[seq.label].add(use)
    return usage


def assert_counted(ftl: Ftl) -> None:
    expected, total = counted(ftl), Usage()
    for label in range(3):
        assert ftl.kv.usage.of(label) == expected[label]
        total.add(expected[label])
    assert ftl.kv.usage.total == total


def test_usage_follows_all_sequence_changes(small_drive: DriveSpec) -> None:
    draw = random.Random(5)
    ftl = Ftl(replace(small_drive, dram_bytes=24 << 10))
    for turn in range(400):
        handles = list(ftl.sequences)
        what = draw.choice(("create", "append", "append", "append", "crop", "fork", "free", "relayout", "flush"))
        try:
            if what == "create" or not handles:
                ftl.label(ftl.create(draw.randint(1, 2), LAYERS, HEADS, LAYOUT), draw.randrange(3))
                continue
            seq = ftl.sequence(draw.choice(handles))
            layer, length = draw.randrange(LAYERS), draw.choice((1, 1, 7, 40, 64))
            if what == "append":
                rows = np.full((length, HEADS, 8), 1, np.float16)
                ftl.append([seq.handle], layer, np.array([length]), rows, rows, 0)
            elif what == "crop":
                ftl.crop(seq.handle, layer, draw.randint(0, int(seq.lengths[layer])), 0)
            elif what == "fork":
                ftl.fork(seq.handle)
            elif what == "free":
                ftl.free([seq.handle], 0)
            elif what == "relayout":
                ftl.relayout(seq.handle, draw.choice((2, 4)), 0)
            else:
                ftl.flush(0)
        except OutOfSpaceError:
            pass
        if turn % 100 == 99:
            ftl.flush(0)
            ftl = Ftl(ftl.spec, ftl.nand)
        assert_counted(ftl)


def test_shared_page_counts_for_each_fork(small_drive: DriveSpec) -> None:
    ftl = Ftl(small_drive)
    (parent,) = ftl.create(1, 1, 1, LAYOUT)
    rows = np.ones((64, 1, 8), np.float16)
    ftl.append([parent], 0, np.array([64]), rows, rows, 0)
    alone = ftl.kv.usage.total.pages
    child = ftl.fork(parent)
    assert ftl.kv.usage.total.pages == 2 * alone > 0
    ftl.free([parent], 0)
    assert ftl.kv.usage.total.pages == alone
    ftl.free([child], 0)
    assert ftl.kv.usage.total == Usage()


@pytest.mark.parametrize("name", LAYOUTS)
def test_table_bytes_cover_a_slot_and_a_buffer_of_each_stream_and_the_sums_of_v(name: str) -> None:
    layout, layers, heads = LAYOUTS[name].paged(4096, 64, 4), 2, 3
    streams = sum(mapped.streams for mapped in maps_of(layout, layers, heads).values())
    used = layers * (4 * heads * 64 * (not layout.opaque) + 12 * streams)
    nbytes = table_bytes(layers, heads, layout)
    assert nbytes >= used
    counted_as_if_all_were_copied = name.startswith(("plain", "opaque", "latent"))
    assert nbytes == used or counted_as_if_all_were_copied
