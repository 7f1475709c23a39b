"""Storage engines on a drive: results that follow from the properties of flash.

partner of: eval/lifetime/engines.py, eval/lifetime/drive.py, eval/lifetime/patterns.py
"""

from dataclasses import replace

import numpy as np
import pytest

from vcsd_eval.lifetime.drive import scaled, years
from vcsd_eval.lifetime.engines import BlockCache, EngineReplay
from vcsd_eval.lifetime.patterns import PATTERNS, WritePattern

WHOLE = WritePattern("whole", 128, False, "a superblock")
QUARTER = WritePattern("quarter", 32, False, "a quarter of one")


def random_prompts(count, blocks=96, seed=0):
    """Prompts of one block, some requested far more often than others, so they are evicted in another order than they
    arrived.
    """
    generator = np.random.default_rng(seed)
    return [(int(blocks * generator.random() ** 2),) for _ in range(count)]


def test_writes_that_fit_have_waf_1_and_are_not_moved(day, load_of):
    counts = EngineReplay(WHOLE, load_of(day([(key,) for key in range(60)]))).run()
    assert (counts.waf, counts.moved_pages, counts.erases) == (1.0, 0, 0)
    assert counts.host_pages == 45 * 64  # three quarters of the day count


def test_whole_superblocks_that_are_discarded_are_never_moved(day, load_of):
    """Garbage collection finds no valid pages; only the journal, which records discards, and wear leveling remain."""
    replay = EngineReplay(WHOLE, load_of(day([(key,) for key in range(400)])), discard=True)
    counts, counters = replay.run(), replay.ftl.counters
    assert counts.erases > 0
    assert counters.moved == counters.levelled
    assert counts.waf < 1.01


def test_more_over_provisioning_never_raises_waf(day, load_of):
    prompts = day(random_prompts(1500))
    result = [EngineReplay(QUARTER, load_of(prompts, percent)).run().waf for percent in (60, 100, 200)]
    assert result == sorted(result, reverse=True)
    assert result[0] > 1


def test_waf_is_same_at_two_scales(day, load_of, spec):
    """Half of the drive with half of the blocks that prompts are made of, and half of the requests."""
    big = replace(spec, geometry=replace(spec.geometry, blocks_per_plane=512))
    result = [
        EngineReplay(QUARTER, load_of(day(random_prompts(6000 // scale, 1000 // scale)), 40, scaled(big, scale))).run()
        for scale in (1, 2)
    ]
    assert result[0].moved_pages > 0
    assert result[1].waf == pytest.approx(result[0].waf, rel=0.05)


def test_years_halve_when_traffic_doubles(day, load_of):
    prompts = random_prompts(600)
    lives = []
    for every_s in (60.0, 30.0):
        load = load_of(day(prompts, every_s=every_s), hours=600 * every_s / 3600)
        lives.append(years(EngineReplay(QUARTER, load).run(), load, 3000))
    assert lives[0] == pytest.approx(2 * lives[1])


def test_engine_replay_is_deterministic(day, load_of):
    load = load_of(day(random_prompts(300)))
    assert EngineReplay(QUARTER, load, 2).run() == EngineReplay(QUARTER, load, 2).run()


def test_reused_blocks_are_read_and_not_written(day, load_of):
    counts = EngineReplay(WHOLE, load_of(day([(1, 2), (1, 2, 3)]), hours=1e-9)).run()
    assert counts.tally.reused_tokens == 256
    assert counts.tally.read_pages == 128
    assert counts.host_pages == 64
    assert counts.wait_us(50) > 0


def test_drives_share_blocks(day, load_of):
    prompts = day([(key,) for key in range(60)])
    written = EngineReplay(WHOLE, load_of(prompts, drives=4)).run().host_pages
    assert 0 < written < 45 * 64 / 2


def test_cache_evicts_least_recently_used_and_uses_slots_in_turn():
    cache = BlockCache(4)  # 3 of them are filled
    assert [cache.put((1, key), 1) for key in range(3)] == [([0], []), ([1], []), ([2], [])]
    cache.held.move_to_end((1, 0))
    assert cache.put((1, 3), 1) == ([3], [1])
    assert cache.put((1, 4), 1) == ([1], [2])


def test_block_larger_than_drive_raises_with_remedy(day, load_of):
    with pytest.raises(ValueError, match="take a smaller --scale"):
        BlockCache(4).put((1, 1), 5)


def test_scale_beyond_blocks_raises(spec):
    with pytest.raises(ValueError, match="must be at most 128"):
        scaled(spec, 129)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda each: each.name)
def test_pattern_has_source_and_divides_blocks(pattern):
    assert 512 % pattern.object_tokens == 0
    assert len(pattern.source) > 40
