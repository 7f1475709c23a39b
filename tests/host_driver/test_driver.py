"""Heads over drives: what is stored and attended is the same for any number of drives, and everything is counted.

partner of: host_driver/traffic.py
"""

import numpy as np
import pytest

from attention_engine import reference
from csd_firmware import InProcessDevice
from csd_spec import Attention, Compression, DeviceError, ModelShape, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.driver import Driver

SHAPE = ModelShape(name="small", layers=2, q_heads=8, kv_heads=4, head_dim=16)
PROMPT = np.array([30, 21])


def half(generator, *shape):
    return generator.standard_normal(shape).astype(np.float16)


class Talk:
    """Two sequences of made-up rows in drives."""

    def __init__(self, drives, attention=Attention("dense", Compression(1)), flush_every=0):
        self.generator = np.random.default_rng(0)
        devices = [InProcessDevice(INSTCSD_ZYNQ7045_8CH) for _ in range(drives)]
        self.driver = Driver(devices, SHAPE, attention, flush_every)
        self.batch = self.driver.create(2, 256)
        self.rows = []
        for layer in range(SHAPE.layers):
            k, v = (half(self.generator, PROMPT.sum(), 4, 16) for _ in "kv")
            self.rows.append((k, v))
            self.driver.append(self.batch, slice(None), layer, PROMPT, lambda rows=(k, v): rows)
        self.driver.settle()

    def step(self, mini_batches=1):
        """Outputs (layers, 2, q_heads, d) of one step, and its q, k, v."""
        given = [
            (half(self.generator, 2, 8, 16), half(self.generator, 2, 4, 16), half(self.generator, 2, 4, 16))
            for _ in range(SHAPE.layers)
        ]
        outs = np.zeros((SHAPE.layers, 2, 8, 16), np.float16)
        with self.driver.step(mini_batches) as parts:
            for layer, (q, k, v) in enumerate(given):
                for number, part in enumerate(parts):
                    rows = slice(number, number + 1) if mini_batches > 1 else slice(None)
                    outs[layer, rows] = self.driver.decode(self.batch, rows, part, layer, q[rows], k[rows], v[rows])
        return outs, given


@pytest.mark.parametrize("drives", [1, 3])
def test_a_step_is_attention_over_all_rows(drives):
    talk = Talk(drives)
    outs, given = talk.step()
    for layer, (q, k, v) in enumerate(given):
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
    assert np.array_equal(k[30], given[0][1][0])
    part = talk.driver.read(talk.batch, slice(None), 0, 20, 15)  # of 31 and 22 tokens
    for found, whole in zip(part, (k, v), strict=True):
        assert np.array_equal(found, np.concatenate([whole[20:31], whole[51:53]]))


def test_outputs_and_counts_are_the_same_for_any_number_of_drives_and_mini_batches():
    runs = [Talk(drives) for drives in (1, 2, 4)]
    outs = [talk.step()[0] for talk in runs]
    assert all(np.array_equal(out, outs[0]) for out in outs)
    assert np.array_equal(Talk(2).step(mini_batches=2)[0], outs[0])
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
    talk = Talk(2, Attention("magic"))
    with pytest.raises(DeviceError, match=r"drive 0: .*magic") as refused:
        talk.step()
    assert refused.value.status is Status.INVALID_FIELD
    assert talk.driver.traffic.step_count == 0  # a step that failed is none


def test_what_was_cropped_or_freed_is_gone():
    talk = Talk(2)
    talk.driver.crop(talk.batch, 0, np.array([10, 30]))
    assert talk.batch.lengths[:, 0].tolist() == [10, 21]
    assert talk.driver.read(talk.batch, slice(None), 0)[0].shape == (31, 4, 16)
    buffers = [device.firmware.ftl.buffers for device in talk.driver.devices]
    talk.driver.free(talk.batch)
    assert all(each.left == each.capacity for each in buffers)


def test_drives_are_flushed_every_so_many_steps():
    talk = Talk(1, flush_every=2)
    flushed = []
    talk.driver.flush = lambda: flushed.append(len(talk.driver.traffic.steps))
    for _ in range(5):
        talk.step()
    assert flushed == [2, 4]
