"""TTFT by its parts, and requests that wait for each other against a simulated queue.

partner of: eval/papers/tutti/reading.py
"""

import math

import numpy as np
import pytest

from kv_cache.cost import BASE
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti.reading import DocumentWorkload, GpuReading, Path, mean_ttft_s

READING = GpuReading.on(Model.load("llama-3-8b"), Gpu.load("h100"), BASE)
PLAIN, LAYERED = Path(25.9e9), Path(25.9e9, layered=True)


def test_prefill_in_parts_costs_same_as_whole():
    """Causal attention: 48K after 16K, plus 16K alone, cost as much as 64K, except for a second start."""
    parts = READING.compute_s(49152, 16384) + READING.compute_s(16384, 0)
    assert parts == pytest.approx(READING.compute_s(65536, 0) + READING.cost.overlay.start_s)


def test_layerwise_load_hides_shorter_part():
    for new, prefix in ((16384, 16384), (64, 131072)):
        compute, load = READING.compute_s(new, prefix), READING.load_s(prefix, PLAIN)
        assert READING.first_token_s(new, prefix, PLAIN) == compute + load
        hidden = READING.first_token_s(new, prefix, LAYERED)
        assert hidden == pytest.approx(max(compute, load) + min(compute, load) / 32)
        assert READING.bubble_s(new, prefix, LAYERED) == pytest.approx(hidden - compute)
    assert READING.first_token_s(64, 0, LAYERED) == READING.first_token_s(64, 0, None) == READING.compute_s(64, 0)


def test_resident_tokens_are_not_loaded():
    some = READING.first_token_s(256, 8192, PLAIN, here=6144)
    assert some == READING.compute_s(256, 8192) + READING.load_s(2048, PLAIN)
    assert READING.first_token_s(256, 8192, LAYERED, here=8192) == READING.compute_s(256, 8192)


def test_crossover_is_where_load_exceeds_compute():
    at = READING.crossover(32768, LAYERED, 64)
    prefix = round(at * 32768)
    for stored, waits in ((prefix - 64, False), (prefix, True)):
        assert (READING.bubble_s(32768 - stored, stored, LAYERED) > READING.compute_s(32768 - stored, stored)) == waits
    assert READING.crossover(32768, Path(1e15, layered=True), 64) == math.inf


def test_length_moments_equal_sampled():
    lengths, weights = DocumentWorkload(16340, 0.6, 256).lengths()
    assert weights @ lengths == pytest.approx(16340)
    assert weights @ lengths**4 == pytest.approx(16340**4 * math.exp(6 * 0.36))


def test_mean_wait_equals_simulated_queue():
    workload, rate, count = DocumentWorkload(16340, 0.6, 256), 1.0, 200_000
    generator = np.random.default_rng(1)
    lengths = np.exp(generator.normal(math.log(16340) - 0.18, 0.6, count))
    hit = generator.random(count) < 0.84
    service = np.array(
        [
            READING.first_token_s(256, length, PLAIN) if stored else READING.first_token_s(256 + length, 0, None)
            for length, stored in zip(lengths, hit, strict=True)
        ]
    )
    arrivals = np.cumsum(generator.exponential(1 / rate, count))
    before = np.cumsum(service) - service
    played = np.maximum.accumulate(arrivals - before) + before - arrivals + service
    moments = workload.moments(READING, 0.84, PLAIN)
    assert moments[0] == pytest.approx(service.mean(), rel=0.01)
    assert mean_ttft_s(moments, rate) == pytest.approx(played.mean(), rel=0.02)


def test_wait_is_infinite_at_service_rate():
    assert mean_ttft_s((0.5, 0.25), 1.9) > mean_ttft_s((0.5, 0.25), 1.0) == pytest.approx(0.75)
    assert mean_ttft_s((0.5, 0.25), 2.0) == math.inf
