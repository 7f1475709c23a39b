"""Heads over drives: stored rows and attention are the same for any number of drives, and everything is counted.

partner of: host_driver/traffic.py, host_driver/batch.py
"""

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_engine import merge, reference
from csd_firmware import InProcessDrive
from csd_spec import AttentionConfig, CompressionBudget, DriveError, ModelShape, SparFParams, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.sparf import FixedBudget
from host_driver.driver import Driver
from tests.properties import examples

SHAPE = ModelShape(name="small", layers=2, q_heads=8, kv_heads=4, head_dim=16)
PROMPT = np.array([30, 21])


def half(generator, *shape):
    return generator.standard_normal(shape).astype(np.float16)


class Talk:
    """Two sequences of made-up rows in drives."""

    def __init__(self, drives, attention=AttentionConfig("dense", CompressionBudget(1)), flush_interval_steps=0):
        self.generator = np.random.default_rng(0)
        devices = [InProcessDrive(INSTCSD_ZYNQ7045_8CH) for _ in range(drives)]
        self.driver = Driver(devices, SHAPE, attention, flush_interval_steps)
        self.batch = self.driver.create(2, 256)
        self.rows = []
        for layer in range(SHAPE.layers):
            k, v = (half(self.generator, PROMPT.sum(), 4, 16) for _ in "kv")
            self.rows.append((k, v))
            self.driver.append(self.batch, slice(None), layer, PROMPT, lambda rows=(k, v): rows)
        self.driver.settle()

    def step(self, micro_batches=1):
        """Outputs (layers, 2, q_heads, d) of one step, and its q, k, v."""
        arrays = [
            (half(self.generator, 2, 8, 16), half(self.generator, 2, 4, 16), half(self.generator, 2, 4, 16))
            for _ in range(SHAPE.layers)
        ]
        outs = np.zeros((SHAPE.layers, 2, 8, 16), np.float16)
        with self.driver.step(micro_batches) as parts:
            for layer, (q, k, v) in enumerate(arrays):
                for number, part in enumerate(parts):
                    rows = slice(number, number + 1) if micro_batches > 1 else slice(None)
                    outs[layer, rows] = self.driver.decode(self.batch, rows, part, layer, q[rows], k[rows], v[rows])
        return outs, arrays


@pytest.mark.parametrize("drives", [1, 3])
def test_a_step_is_attention_over_all_rows(drives):
    talk = Talk(drives)
    outs, arrays = talk.step()
    for layer, (q, k, v) in enumerate(arrays):
        for row, (first, end) in enumerate(((0, 30), (30, 51))):
            for head in range(SHAPE.kv_heads):
                K, V = (
                    np.concatenate([stored[first:end, head], new[row, head][None]]).astype(np.float64)
                    for stored, new in zip(talk.rows[layer], (k, v), strict=True)
                )
                expected = reference.dense(q[row, 2 * head : 2 * head + 2].astype(np.float64), K, V)
                assert abs(outs[layer, row, 2 * head : 2 * head + 2] - expected).max() < 5e-3
    k, v = talk.driver.read(talk.batch, slice(None), 0)
    assert np.array_equal(k[:30], talk.rows[0][0][:30])
    assert np.array_equal(k[30], arrays[0][1][0])
    part = talk.driver.read(talk.batch, slice(None), 0, 20, 15)  # of 31 and 22 tokens
    for result, whole in zip(part, (k, v), strict=True):
        assert np.array_equal(result, np.concatenate([whole[20:31], whole[51:53]]))


def test_outputs_equal_for_drives_and_batches():
    runs = [Talk(drives) for drives in (1, 2, 4)]
    outs = [talk.step()[0] for talk in runs]
    assert all(np.array_equal(out, outs[0]) for out in outs)
    assert np.array_equal(Talk(2).step(micro_batches=2)[0], outs[0])
    one, *others = (talk.driver.traffic.steps[0] for talk in runs)
    for step in others:
        assert step.plain_offload_bytes == one.plain_offload_bytes == (31 + 22) * SHAPE.kv_bytes_per_token
        assert step.flash.useful_bytes == one.flash.useful_bytes
        assert step.ns < one.ns  # fewer heads each
    for talk in runs:
        (step,), traffic = talk.driver.traffic.steps, talk.driver.traffic
        assert sum(step.breakdown_ns.values()) == step.ns
        assert step.ns + traffic.prefill_ns <= talk.driver.now_ns
        assert len(traffic.busy_ns) == len(talk.driver.devices)
        assert max(traffic.busy_ns) >= step.ns  # the slowest drive's commands are the step


def test_a_refusal_names_the_drive():
    talk = Talk(2, AttentionConfig("magic"))
    with pytest.raises(DriveError, match=r"drive 0: .*magic") as refused:
        talk.step()
    assert refused.value.status is Status.INVALID_FIELD
    assert talk.driver.traffic.step_count == 0  # a failed step is not counted


def test_cropped_or_freed_rows_are_gone():
    talk = Talk(2)
    talk.driver.crop(talk.batch, slice(None), 0, np.array([10, 30]))
    assert talk.batch.lengths[:, 0].tolist() == [10, 21]
    assert talk.driver.read(talk.batch, slice(None), 0)[0].shape == (31, 4, 16)
    buffers = [device.firmware.ftl.buffers for device in talk.driver.devices]
    talk.driver.free(talk.batch)
    assert all(buffer.left == buffer.capacity for buffer in buffers)


def test_read_inside_a_step_does_not_turn_time_back():
    """Copies from drives during a step may end after it: the step keeps its time, and the host's time its direction."""
    talk, alone = Talk(1), Talk(1)
    alone.step()
    q, k, v = half(talk.generator, 2, 8, 16), half(talk.generator, 2, 4, 16), half(talk.generator, 2, 4, 16)
    with talk.driver.step(1) as (part,):
        for layer in range(SHAPE.layers):
            talk.driver.decode(talk.batch, slice(None), part, layer, q, k, v)
        while talk.driver.now_ns <= part.now_ns:
            talk.driver.read(talk.batch, slice(None), 0)
        read_ns = talk.driver.now_ns
    assert talk.driver.now_ns == read_ns
    assert talk.driver.traffic.total.ns == alone.driver.traffic.total.ns > 0


def test_drives_are_flushed_every_n_steps():
    talk = Talk(1, flush_interval_steps=2)
    flushed = []
    talk.driver.flush = lambda: flushed.append(len(talk.driver.traffic.steps))
    for _ in range(5):
        talk.step()
    assert flushed == [2, 4]


def test_softmax_rows_are_ordered_as_output():
    """For any number of drives; query heads one after the other."""
    result = []
    for drives in (1, 3):
        talk = Talk(drives)
        q, k, v = (half(np.random.default_rng(1), 2, heads, 16) for heads in (8, 4, 4))
        with talk.driver.step(1) as (part,):
            out, rows = talk.driver.attend(talk.batch, slice(None), part, 0, q, k, v)
        assert (out.shape, rows.shape, rows.dtype) == ((2, 8, 16), (2, 8, 2), np.float32)
        for row, first, end in ((0, 0, 30), (1, 30, 51)):
            for head in range(8):
                K = np.concatenate([talk.rows[0][0][first:end, head // 2], k[row, head // 2][None]]).astype(np.float64)
                wanted = reference.dense_rows(q[row, head][None].astype(np.float64), K)[0]
                np.testing.assert_allclose(rows[row, head], wanted, rtol=1e-4, atol=1e-5)
        result.append((out, rows))
    for one, other in zip(*result, strict=True):
        np.testing.assert_array_equal(one, other)


def cut(generator, lengths, attention):
    """Cut a sequence of random rows into sequences of these lengths, each in its own drives.

    Returns q (8, 16), K and V of the parts, (tokens, 4, 16), and the drives' results: outputs and rows of the parts.
    """
    q, parts, expected = 2 * half(generator, 1, 8, 16), [], []
    for number, length in enumerate(lengths):
        k, v = half(generator, length, 4, 16), half(generator, length, 4, 16)
        devices = [InProcessDrive(INSTCSD_ZYNQ7045_8CH) for _ in range(1 + number % 2)]
        driver = Driver(devices, replace(SHAPE, layers=1), attention)
        batch = driver.create(1, 256)
        if length > 1:
            driver.append(batch, slice(None), 0, np.array([length - 1]), lambda k=k, v=v: (k[:-1], v[:-1]))
        with driver.step(1) as (micro_batch,):  # the last row comes with the question
            out, rows = driver.attend(batch, slice(None), micro_batch, 0, q, k[-1:], v[-1:])
        driver.close()
        parts.append((k, v))
        expected.append((out[0].astype(np.float32), rows[0]))
    return q[0], parts, expected


def of_head(head, q, parts):
    """Inputs of a KV head in float64: q (2, 16), and K and V of each part, (tokens, 16)."""
    wide = [[rows[:, head].astype(np.float64) for rows in part] for part in parts]
    return q[2 * head : 2 * head + 2].astype(np.float64), wide


def whole_of(parts):
    return [np.concatenate(rows) for rows in zip(*parts, strict=True)]


def log_weight(rows):
    return np.log(rows[:, 1].astype(np.float64)) + rows[:, 0]


LENGTHS = st.lists(st.integers(1, 90), min_size=2, max_size=3)
HALF_ERROR = 2.0**-11 + 1e-4  # of the largest |V|: an output's rounding to FP16, and FP32's sums


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS)
def test_a_sequence_in_parts_is_attended_as_one(seed, lengths):
    q, parts, expected = cut(np.random.default_rng(seed), lengths, AttentionConfig("dense", CompressionBudget(1)))
    out, rows = merge(*zip(*expected, strict=True))
    for head in range(4):
        some, wide = of_head(head, q, parts)
        K, V = whole_of(wide)
        which = slice(2 * head, 2 * head + 2)
        np.testing.assert_allclose(out[which], reference.dense(some, K, V), rtol=0, atol=HALF_ERROR * np.abs(V).max())
        np.testing.assert_allclose(log_weight(rows[which]), log_weight(reference.dense_rows(some, K)), atol=1e-4)


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS, r=st.sampled_from([4, 16]), k=st.sampled_from([4, 20, 60]))
def test_sparse_parts_error_equals_missed_mass(seed, lengths, r, k):
    """The merged output and dense attention are both weighted means of V. They differ by at most the range of V times
    the weight that differs: among the parts, and in each part beyond the weight of the attended tokens. With all
    channels every part knows its weight.
    """
    attention = AttentionConfig("sparf", FixedBudget(SparFParams(r, k, k // 4)))
    q, parts, expected = cut(np.random.default_rng(seed), lengths, attention)
    out, rows = merge(*zip(*expected, strict=True))
    for head in range(4):
        some, wide = of_head(head, q, parts)
        K, V = whole_of(wide)
        which = slice(2 * head, 2 * head + 2)
        true, said, shared = [], [], []
        for part_k, part_v in wide:
            count = min(k, len(part_k))
            arguments = r, count, min(k // 4, count)
            tokens = reference.sparf(some, part_k, part_v, *arguments)[2]
            true.append(log_weight(reference.dense_rows(some, part_k)))
            said.append(log_weight(reference.sparf_rows(some, part_k, *arguments)))
            attended = log_weight(reference.dense_rows(some, part_k[tokens]))
            shared.append(np.exp(attended - np.maximum(true[-1], said[-1])))
        p, claimed = (np.exp(weights - np.logaddexp.reduce(weights)) for weights in (np.array(true), np.array(said)))
        elsewhere = np.abs(p - claimed).sum(0) / 2 + (p * (1 - np.array(shared))).sum(0)  # (2,)
        bound = elsewhere[:, None] * np.ptp(V, axis=0) + HALF_ERROR * np.abs(V).max()
        assert (np.abs(out[which] - reference.dense(some, K, V)) <= bound).all()
        np.testing.assert_allclose(log_weight(rows[which]), np.logaddexp.reduce(said), atol=1e-3)
        if r == 16:
            np.testing.assert_allclose(log_weight(rows[which]), np.logaddexp.reduce(true), atol=1e-3)


def test_prefill_takes_the_time_until_the_last_drive_has_stored():
    """A layer that was stored before another one takes no more, and the clock never goes back."""

    def stored(*finish_ns):
        return SimpleNamespace(result=lambda: [SimpleNamespace(finish_ns=each) for each in finish_ns])

    shipped = deque([stored(150, 120), stored(130, 140), stored(160)])
    driver = SimpleNamespace(
        _in_flight=shipped, _collect=lambda done: done, traffic=SimpleNamespace(prefill_ns=0), now_ns=100
    )
    for now_ns in (150, 150, 160):
        Driver._settle_oldest(driver)
        assert (driver.now_ns, driver.traffic.prefill_ns) == (now_ns, now_ns - 100)
    assert not shipped
