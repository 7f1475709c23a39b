"""A small trace, and a host with two drives."""

import json

import pytest

from csd_spec.network import network_named
from csd_spec.presets import INSTCSD_OVERLAPPED
from kv_cache.trace_file import load
from vcsd_eval.fleet.drive_model import coefficients
from vcsd_eval.fleet.machine import FleetHost
from vcsd_eval.papers.profiles import Gpu, Model


@pytest.fixture(scope="session")
def trace_path(tmp_path_factory):
    """120 requests, one every 20 seconds, of very different lengths."""
    path = tmp_path_factory.mktemp("fleet") / "small.jsonl"
    lines = [
        {
            "timestamp": 20_000 * number,
            "input_length": 300 + 701 * number % 6_000,
            "output_length": 1 + 37 * number % 90,
            "hash_ids": [],
        }
        for number in range(120)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def trace(trace_path):
    return load(trace_path)


@pytest.fixture
def machine():
    return FleetHost(
        model=Model.load("llama-3-8b"),
        gpu=Gpu.load("h100"),
        spec=INSTCSD_OVERLAPPED,
        fitted=coefficients(),
        network=network_named("100gbe-rdma"),
        drives=16,
        slots=8,
    )
