"""A small trace with shared prefixes through all systems.

partner of: eval/papers/tutti/prefixes.py
"""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from kv_cache.cost import BASE
from kv_cache.trace import Request, Trace
from vcsd_eval.papers.options import MachineOptions
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti.evaluate import TUTTI
from vcsd_eval.papers.tutti.prefixes import (
    SYSTEMS,
    ServedTrace,
    experiment,
    find_hits,
    most_speed,
    service_s,
    spread,
    ttft_s,
)
from vcsd_eval.papers.tutti.reading import GpuReading
from vcsd_eval.papers.tutti.reuse import PrefixQuestion

READING = GpuReading.on(Model.load("llama-3-8b"), Gpu.load("h100"), BASE)


def served(path, gpu=None):
    trace = ServedTrace(trace=path, stores="1", speed=0.5)
    return experiment(MachineOptions(gpu=gpu), PrefixQuestion(), trace)


def trace_of(*prompts):
    requests = [
        Request(number=number, arrival=float(number), input_tokens=512 * len(prompt), output_tokens=1, hashes=prompt)
        for number, prompt in enumerate(prompts)
    ]
    return Trace(name="small", requests=requests, block_tokens=512)


@pytest.fixture
def outcome(tmp_path):
    """Turns of three conversations, each a tenth of the GPU's memory."""
    path = tmp_path / "turns.jsonl"
    lines = [
        {
            "timestamp": 3000 * turn,
            "input_length": 512 * 20 * (turn + 1),
            "output_length": 1,
            "hash_ids": [1000 * who + number for number in range(20 * (turn + 1))],
        }
        for turn in range(4)
        for who in range(3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return served(path)


def test_hits_are_split_into_gpu_and_store():
    trace = trace_of((1, 2), (3,), (1, 2, 4), (1, 2))
    any_size = find_hits(trace, gpu_blocks=1, store_blocks=None)
    assert (any_size.stored, any_size.on_gpu) == ([0, 0, 1024, 1023], [0, 0, 0, 512])
    assert (any_size.blocks, any_size.written) == (4, 4)
    only_gpu = find_hits(trace, gpu_blocks=8, store_blocks=0)
    assert only_gpu.stored == only_gpu.on_gpu == [0, 0, 1024, 1023]


def test_service_time_is_prefill_plus_load():
    trace = trace_of((1, 2), (1, 2, 3))
    hits = find_hits(trace, gpu_blocks=0, store_blocks=None)
    first, second = service_s(trace.requests, hits, SYSTEMS["Tutti"], READING)
    assert first == READING.compute_s(1024, 0)
    assert second == READING.first_token_s(512, 1024, TUTTI)
    near = find_hits(trace, gpu_blocks=8, store_blocks=None)
    assert service_s(trace.requests, near, SYSTEMS["LMCache-SSD"], READING)[1] == READING.compute_s(512, 1024)


def test_requests_queue_in_order():
    assert ttft_s(np.array([0.0, 1.0, 10.0]), np.array([3.0, 2.0, 1.0])).tolist() == [3, 4, 1]


def test_equal_arrival_times_are_spread():
    assert spread(np.array([0.0, 0.0, 3.0, 3.0, 3.0, 6.0])).tolist() == [0, 1.5, 3, 4, 5, 6]


def test_highest_rate_meets_the_limit():
    arrivals, service = np.arange(100.0), np.full(100, 0.5)
    result = most_speed(arrivals, service, lambda each: bool(each.mean() < 0.75))
    assert ttft_s(arrivals / result, service).mean() == pytest.approx(0.75, rel=1e-3) and result > 2


def test_systems_differ_by_hits_paths_and_prices(outcome):
    rows = {row["system"]: row for row in outcome.result["systems"]}
    json.dumps(outcome.result)
    assert list(rows) == list(SYSTEMS)
    assert rows["HBM"]["hit_percent"] == rows["Tutti"]["hit_percent"] == pytest.approx(60)  # all of it fits the GPU
    assert outcome.result["stores"][0]["hit_percent"] < outcome.result["stores"][-1]["hit_percent"] == pytest.approx(60)
    assert rows["Tutti"]["dollars_per_hour"] == pytest.approx(6.148)
    assert rows["LMCache-GDS"]["dollars_per_hour"] == pytest.approx(8.4008)
    assert rows["LMCache-DRAM"]["dollars_per_hour"] == pytest.approx(7.2528)


def test_small_gpu_loads_more_prefixes(outcome, tmp_path):
    again = served(tmp_path / "turns.jsonl", "rtx4090")
    rows = {row["system"]: row for row in again.result["systems"]}
    assert rows["HBM"]["hit_percent"] < rows["Tutti"]["hit_percent"]
    assert rows["ours"]["service_s"] <= rows["Tutti"]["service_s"] < rows["LMCache-GDS"]["service_s"]
    assert rows["LMCache-GDS"]["service_s"] < rows["LMCache-SSD"]["service_s"]
    with pytest.raises(ValueError, match="are filled by the weights"):
        served(tmp_path / "turns.jsonl", "rtx5060ti-16gb")


def test_a_trace_without_hashes_is_refused(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n")
    with pytest.raises(ValueError, match="has no block hashes"):
        served(path)


def test_prefixes_text_has_hits_and_systems(outcome):
    page = io.StringIO()
    for part in outcome.shown:
        Console(file=page, width=160).print(part)
    assert "Hits of stores" in page.getvalue() and "LMCache-GDS" in page.getvalue()
