"""Preloading before the first layer is computed: all layers that fit, to the last byte."""

from types import SimpleNamespace

import pytest

from kv_cache.block_table import BlockKey
from kv_cache.policies.preload import Preload
from kv_cache.policies.tutti import Tutti


@pytest.mark.parametrize(("lacking", "copied"), [(80, 1), (81, 0)])
def test_prefix_that_just_fits_is_preloaded(monkeypatch, lacking, copied):
    seen = []
    monkeypatch.setattr(Tutti, "layers", lambda policy, it: seen.append(("tutti", policy.ahead)))
    iteration = SimpleNamespace(
        layers=range(1),
        parts="kv",
        batch=["r"],
        new_bytes=lambda row: 10,
        blocks=lambda layer: [BlockKey("r", layer)],
        missing_bytes=lambda block, tier: lacking,
        free_bytes=lambda tier: 100,
        copy=lambda block, tier: seen.append("copy"),
        wait=lambda *transfers: seen.append(("wait", len(transfers))),
    )
    Preload().layers(iteration)
    assert seen == ["copy"] * copied + [("wait", copied), ("tutti", 0)]
