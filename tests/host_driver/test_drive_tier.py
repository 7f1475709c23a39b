"""A layer of a block in drives: ranges of tokens are stored, read and cut there, and nothing else.

partner of: host_driver/drive_tier.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from csd_firmware import InProcessDrive
from csd_spec import AttentionConfig, ModelShape
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.drive_tier import DriveTier
from host_driver.driver import Driver
from host_driver.kv_format import KVFormat
from kv_cache.block_table import BlockKey

SHAPE = ModelShape(name="tiny", layers=2, q_heads=4, kv_heads=2, head_dim=64)
V_CHANNELS, LAYER = 48, 1


@pytest.fixture
def tier():
    driver = Driver([InProcessDrive(INSTCSD_ZYNQ7045_8CH) for _ in range(2)], SHAPE, AttentionConfig.named("dense"))
    tier = DriveTier(driver, KVFormat(torch.float16, SHAPE.kv_heads, SHAPE.head_dim, V_CHANNELS), 32)
    yield tier
    tier.close()
    assert not tier.sequences
    for device in driver.devices:
        assert not device.firmware.ftl.sequences
    driver.close()


def rows_of(tier, tokens, seed=0):
    values = np.random.default_rng(seed).standard_normal(tokens * tier.format.row_bytes // 2)
    return values.astype(np.float16)


def read(tier, frame, first, tokens):
    into = bytearray(tokens * tier.format.row_bytes)
    frame.load(first * tier.format.row_bytes, memoryview(into))
    return np.frombuffer(into, np.float16)


def test_ranges_of_tokens_are_stored_and_read(tier):
    frame, rows = tier.frame(BlockKey("a", LAYER, "kv", 0), 32 * tier.format.row_bytes), rows_of(tier, 9)
    values = len(rows) // 9
    frame.store(0, memoryview(rows).cast("B"))
    assert frame.view(0, tier.format.row_bytes) is None  # the host cannot map a drive's bytes
    assert np.array_equal(read(tier, frame, 0, 9), rows)
    assert np.array_equal(read(tier, frame, 4, 3), rows[4 * values : 7 * values])
    again = rows_of(tier, 5, seed=1)
    frame.store(6 * tier.format.row_bytes, memoryview(again).cast("B"))
    assert np.array_equal(read(tier, frame, 0, 11), np.concatenate([rows[: 6 * values], again]))


def test_a_cut_or_freed_layer_keeps_the_tokens_before(tier):
    frame, other = (tier.frame(BlockKey("a", layer, "kv", 0), 0) for layer in (LAYER, 0))
    rows = rows_of(tier, 9)
    for layer in (frame, other):
        layer.store(0, memoryview(rows).cast("B"))
    frame.trim(4 * tier.format.row_bytes)
    assert np.array_equal(read(tier, frame, 0, 4), rows[: 4 * len(rows) // 9])
    frame.trim(3 * tier.format.row_bytes + 1)  # a part of a token stays as a whole
    batch, _ = tier.sequences["a", 0]
    assert batch.lengths[0].tolist() == [9, 4]
    frame.free()
    assert batch.lengths[0].tolist() == [9, 0]
    with pytest.raises(AssertionError, match="not stored"):
        read(tier, frame, 0, 1)
    with pytest.raises(AssertionError, match="after a gap"):
        frame.store(2 * tier.format.row_bytes, memoryview(rows).cast("B"))
    assert np.array_equal(read(tier, other, 0, 9), rows)


@pytest.mark.parametrize(("at", "more"), [(1, 0), (0, 1), (1, 1)])
def test_part_of_a_token_is_refused(tier, at, more):
    frame = tier.frame(BlockKey("a", LAYER, "kv", 0), 0)
    with pytest.raises(ValueError, match="must be whole tokens"):
        frame.load(at, memoryview(bytearray(tier.format.row_bytes + more)))


def test_a_forgotten_request_leaves_others(tier):
    for request in ("a", "b"):
        tier.frame(BlockKey(request, LAYER, "kv", 0), 0)
        tier.frame(BlockKey(request, LAYER, "kv", 1), 0)
    tier.forget("a")
    assert set(tier.sequences) == {("b", 0), ("b", 1)}
    assert all(len(device.firmware.ftl.sequences) == 2 for device in tier.driver.devices)


def test_values_are_padded_to_the_channels_of_keys(tier):
    v = np.ones((3, 2, V_CHANNELS), np.float16)
    padded = tier.padded(v)
    assert padded.shape == (3, 2, SHAPE.head_dim)
    assert (padded[..., :V_CHANNELS] == 1).all() and not padded[..., V_CHANNELS:].any()


def test_requests_attend_together_whether_created_together_or_not(tier):
    """The rows of one batch, some of them, and rows of several batches."""
    tier.create(["a", "b", "c"])
    generator = np.random.default_rng(0)
    q, k, v = (
        generator.standard_normal((4, heads, channels)).astype(np.float16)
        for heads, channels in ((4, SHAPE.head_dim), (2, SHAPE.head_dim), (2, V_CHANNELS))
    )
    for requests in (["a", "b", "c"], ["c", "b"], ["b", "other"]):
        rows = [["a", "b", "c", "other"].index(request) for request in requests]
        with tier.together(requests) as (batch, numbers):
            assert (batch is tier.sequences["b", 0][0]) == ("other" not in requests)
            before = batch.lengths[numbers, LAYER].copy()
        with tier.step() as (micro_batch,):
            out, sums = tier.attend_block(requests, 0, micro_batch, LAYER, q[rows], k[rows], v[rows])
        assert out.shape == (len(requests), SHAPE.q_heads, V_CHANNELS) and sums.shape == (*out.shape[:2], 2)
        for row, (keys, values), length in zip(rows, tier.read(requests, LAYER), before, strict=True):
            assert np.array_equal(keys, np.stack([k[row]] * (length + 1)))
            assert np.array_equal(values, np.stack([v[row]] * (length + 1)))
    tier.crop(LAYER, {"a": 5, "b": 1, "c": 0})
    assert [len(keys) for keys, _ in tier.read(["a", "b", "c"], LAYER)] == [1, 1, 0]
    tier.free(["a", "c"])
    assert set(tier.sequences) == {("b", 0), ("other", 0)}
    assert all(len(device.firmware.ftl.sequences) == 2 for device in tier.driver.devices)
