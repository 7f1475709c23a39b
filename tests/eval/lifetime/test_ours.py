"""Prefixes as sequences: pages match the layout's groups, forks share them, and eviction keeps within the drive."""

import numpy as np
import pytest

from vcsd_eval.lifetime.ours import OurReplay


def test_prompt_and_answer_are_programmed_once(day, load_of):
    """2 layers, 2 heads, keys and values: a page holds 16 rows of 32 bytes. 128 + 16 - 1 tokens fill 8 groups."""
    counts = OurReplay("plain", load_of(day([(1,)], output=16), hours=1e-9)).run()
    assert counts.host_pages == 2 * 2 * 2 * (143 // 16)


def test_layouts_are_ordered_by_programmed_pages(day, load_of):
    prompts = day([(key, 100 + key, 200 + key, 300 + key) for key in range(6)], output=1)
    pages = {name: OurReplay(name, load_of(prompts)).run().host_pages for name in ("plain", "fp16", "int4")}
    assert pages["plain"] < pages["int4"] < pages["fp16"] <= 1.5 * pages["plain"]


def test_continued_prompt_writes_only_new_tokens(day, load_of):
    replay = OurReplay("plain", load_of(day([(1, 2), (1, 2, 3), (1, 4)], output=1)))
    counts = [0]
    for number, visit in enumerate(replay.load.day.visits):
        replay.visit(visit, number)
        counts.append(replay.ftl.counters.data)
    assert np.diff(counts).tolist() == [128, 64, 64]
    assert replay.meter.tally.reused_tokens == 256 + 128
    assert len(replay.ftl.sequences) == 2  # the second went on, the third parted


def test_eviction_keeps_within_capacity_and_forgets_oldest(day, load_of):
    replay = OurReplay("plain", load_of(day([(key,) for key in range(300)])))
    replay.run()
    assert replay.ftl.placement.valid.sum() <= replay.load.logical_pages
    kept = [key for _, key in replay.blocks]
    assert kept == list(range(300 - len(kept), 300))
    assert len(replay.ftl.sequences) == len(kept)


def test_freed_whole_sequences_cause_few_moves(day, load_of):
    counts = OurReplay("plain", load_of(day([(key,) for key in range(600)], output=1))).run()
    assert counts.erases > 0
    assert counts.waf < 1.3


@pytest.mark.parametrize("name", ["plain", "fp16"])
def test_our_replay_is_deterministic(day, load_of, name):
    load = load_of(day([(key % 9, key) for key in range(200)]))
    assert OurReplay(name, load).run() == OurReplay(name, load).run()
