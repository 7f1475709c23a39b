"""Heads over drives."""

import subprocess
import sys

import pytest

from host_driver.sharding import split_heads


@pytest.mark.parametrize(("heads", "drives"), [(4, 1), (4, 3), (40, 7), (8, 8)])
def test_heads_are_shared_out_evenly_and_once(heads, drives):
    parts = split_heads(heads, drives)
    assert [head for part in parts for head in part] == list(range(heads))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("drives", "reason"), [(0, "at least 1"), (-1, "at least 1"), (5, "4 KV heads")])
def test_impossible_splits(drives, reason):
    with pytest.raises(ValueError, match=reason):
        split_heads(4, drives)


def test_the_driver_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import host_driver.driver"
    subprocess.run([sys.executable, "-c", code], check=True)
