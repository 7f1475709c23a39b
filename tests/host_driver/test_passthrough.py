"""Tensors to a queue and back, and attention with the same bits on every machine."""

import numpy as np
import pytest

from attention_engine import reference
from csd_io.direct import open_queue
from host_driver.passthrough import Layers, attend, digests, round_trip
from tests.csd_io.test_extents import sim_queue

SMALL = Layers.random(layers=2, tokens=33, heads=3, group=2, dim=16)


def test_guest_attention_equals_reference():
    out = attend(SMALL.q[0], SMALL.k[0], SMALL.v[0])
    wide = [array[0].astype(np.float64) for array in (SMALL.q, SMALL.k, SMALL.v)]
    for head in range(3):
        expected = reference.dense(wide[0][head], wide[1][:, head], wide[2][:, head])
        np.testing.assert_allclose(out[head], expected, rtol=1e-13, atol=1e-14)


def test_guest_weights_underflow_as_in_reference():
    q = np.full((1, 1, 4), 200, np.float16)
    k = np.array([[[200.0] * 4], [[-200.0] * 4], [[199.0] * 4]], np.float16)
    v = np.arange(12, dtype=np.float16).reshape(3, 1, 4)
    np.testing.assert_allclose(attend(q, k, v)[0, 0], v[0, 0].astype(np.float64), atol=1e-150)


@pytest.mark.parametrize("seed", range(3))
def test_round_trip_returns_tensors_then_discards(seed):
    queue = sim_queue(seed, blocks=256)
    read_back, expected = round_trip(queue, SMALL), digests(SMALL, SMALL.tensors())
    assert {name: read_back[name] for name in expected} == expected
    assert read_back["zeros"] and read_back["request_bytes"] <= queue.max_bytes
    assert read_back["depth"] == min(32, read_back["requests"])


def test_a_failing_read_is_an_error(monkeypatch):
    queue = sim_queue(0, blocks=256)
    queue.bad = 0.5
    with pytest.raises(OSError, match="disk/blocks"):
        round_trip(queue, SMALL)


def test_file_works_like_a_namespace(tmp_path):
    layers = Layers.random(layers=2, tokens=2048, heads=8, group=1, dim=64)
    queue = open_queue(tmp_path, 16 << 20)
    queue.max_bytes = 256 << 10
    read_back, expected = round_trip(queue, layers), digests(layers, layers.tensors())
    queue.close()
    assert {name: read_back[name] for name in expected} == expected
    assert (read_back["requests"], read_back["request_bytes"], read_back["depth"], read_back["zeros"]) == (
        32,
        256 << 10,
        32,
        True,
    )


def test_layers_load_from_file_invalid_are_refused(tmp_path):
    SMALL.save(tmp_path / "a.npz")
    for name in "qkv":
        np.testing.assert_array_equal(getattr(Layers.load(tmp_path / "a.npz"), name), getattr(SMALL, name))
    np.savez(tmp_path / "b.npz", q=SMALL.q, k=SMALL.k)
    with pytest.raises(ValueError, match="v is not a file"):
        Layers.load(tmp_path / "b.npz")
    with pytest.raises(ValueError, match="same layers"):
        Layers(SMALL.q, SMALL.k, SMALL.v[:1])
    with pytest.raises(ValueError, match="float16"):
        Layers(SMALL.q.astype(np.float32), SMALL.k, SMALL.v)
