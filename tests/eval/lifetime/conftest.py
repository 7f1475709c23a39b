"""A small drive and model, so that a simulated day takes little time."""

from dataclasses import replace

import pytest

from csd_spec import ModelShape
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd_eval.lifetime.drive import DriveTraffic
from vcsd_eval.lifetime.workload import Day, Visit

BLOCK = 128  # tokens: 64 pages, a superblock


@pytest.fixture
def spec():
    """4 lanes, 128 superblocks of 64 pages of 512 bytes."""
    geometry = replace(
        INSTCSD_ZYNQ7045_8CH.geometry,
        channels=2,
        dies_per_channel=2,
        planes_per_die=1,
        blocks_per_plane=128,
        pages_per_block=16,
        page_bytes=512,
    )
    return replace(INSTCSD_ZYNQ7045_8CH, name="tiny", geometry=geometry, dram_bytes=1 << 20)


@pytest.fixture
def day():
    """Makes requests from tuples of blocks, one a minute, of `output` tokens each."""

    def make(prompts, output=16, every_s=60.0):
        visits = [
            Visit(every_s * number, tuple((1, key) for key in keys), BLOCK * len(keys), output, 0)
            for number, keys in enumerate(prompts)
        ]
        return Day(visits, BLOCK)

    return make


@pytest.fixture
def load_of(spec):
    """Makes the load of one drive from a day; a token has 256 bytes."""
    shape = ModelShape(name="tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16)

    def make(day, percent=28.0, of=spec, hours=None, drives=1):
        return DriveTraffic(of, shape, drives, day, hours or (day.visits[-1].arrival_s + 60) / 3600, 1, percent)

    return make
