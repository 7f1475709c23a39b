"""Heads over drives."""

import subprocess
import sys

import pytest

from csd_spec import ModelShape
from host_driver.sharding import assign_heads, split_heads


@pytest.mark.parametrize(("heads", "drives"), [(4, 1), (4, 3), (40, 7), (8, 8)])
def test_heads_are_split_evenly_and_once(heads, drives):
    parts = split_heads(heads, drives)
    assert [head for part in parts for head in part] == list(range(heads))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("drives", "reason"), [(0, "at least 1"), (-1, "at least 1"), (5, "4 KV heads")])
def test_invalid_splits_are_refused(drives, reason):
    with pytest.raises(ValueError, match=reason):
        split_heads(4, drives)


def test_query_heads_follow_their_kv_heads():
    parts = assign_heads(ModelShape(name="grouped", layers=1, q_heads=12, kv_heads=4, head_dim=8), 3)
    assert [(part.kv_heads, part.q_heads) for part in parts] == [
        (range(1), range(3)),
        (range(1, 2), range(3, 6)),
        (range(2, 4), range(6, 12)),
    ]
    assert {part.group for part in parts} == {3}


def test_latent_stream_in_all_drives_queries_split():
    latent = ModelShape(name="latent", layers=1, q_heads=7, kv_heads=1, head_dim=8, latent=True)
    parts = assign_heads(latent, 3)
    assert [part.kv_heads for part in parts] == [range(1)] * 3
    assert [part.q_heads for part in parts] == [range(2), range(2, 4), range(4, 7)]
    for drives in (0, 8):
        with pytest.raises(ValueError, match="7, the model's query heads"):
            assign_heads(latent, drives)


def test_the_driver_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import host_driver.driver"
    subprocess.run([sys.executable, "-c", code], check=True)
