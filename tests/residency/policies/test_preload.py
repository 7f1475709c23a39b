"""What is read before the first layer is computed: all that fits, to the last byte."""

from types import SimpleNamespace

import pytest

from residency.policies.preload import preload
from residency.table import Extent


@pytest.mark.parametrize(("lacking", "copied"), [(80, 1), (81, 0)])
def test_what_fits_to_the_last_byte_is_read_first(monkeypatch, lacking, copied):
    seen = []
    monkeypatch.setitem(preload.__globals__, "tutti", lambda t, home, ahead: seen.append(("tutti", ahead)))
    turn = SimpleNamespace(
        layers=range(1),
        parts="kv",
        batch=["r"],
        new_bytes=lambda row: 10,
        extents=lambda layer: [Extent("r", layer)],
        lacking=lambda extent, place: lacking,
        room=lambda place: 100,
        copy=lambda extent, place: seen.append("copy"),
        wait=lambda *tickets: seen.append(("wait", len(tickets))),
    )
    preload(turn)
    assert seen == ["copy"] * copied + [("wait", copied), ("tutti", 0)]
