"""A decode step of the form of a checked one is accepted without further checks; any other is not.

partner of: csd_firmware/decode_plan.py
"""

from dataclasses import replace

import numpy as np

from csd_firmware.decode_plan import accepted, register
from csd_spec import Attend
from tests.ftl.kv.test_layer_plan import LAYOUT, H, decoding


def command_of(handles, rows, **fields):
    q, counts = np.ones((2, H, 3, LAYOUT.head_dim), np.float16), np.ones(2, np.int64)
    return replace(Attend(handles, 0, q, rows, rows, "dense", 4, counts, counts), **fields)


def test_plan_accepts_checked_shape_within_bounds(small_drive):
    ftl, handles, rows = decoding(small_drive)
    plan, good = ftl.kv.plan(handles, 0), command_of(handles, rows)
    assert not accepted(plan, good, 100), "none was checked"
    register(plan, good, run := lambda: None, 100)
    assert accepted(plan, good, 100) is run
    assert not accepted(plan, good, 99), "its completion is longer"
    assert accepted(plan, replace(good, k=-rows, top_k=good.top_k + 7), 100), "values are checked when it runs"
    others = {"method": "sparf", "r": 5, "q": good.q[::-1], "k": rows[:1], "v": rows.astype(np.float32)}
    others |= {"top_k": good.top_k.astype(np.int32), "recent": None, "terms": np.zeros((H, 3, 4), np.float32)}
    for name, value in [*others.items(), ("r", 4.0), ("layer", False), ("seqs", (1.0, 2))]:
        assert not accepted(plan, replace(good, **{name: value}), 100), name
    while plan.in_bounds():
        assert accepted(plan, good, 100)
        plan.append(rows, rows)
    assert not accepted(plan, good, 100)


class Subclass(np.ndarray):
    """An array that may not be only that."""


def test_arrays_of_a_subclass_are_never_accepted(small_drive):
    ftl, handles, rows = decoding(small_drive)
    plan, good = ftl.kv.plan(handles, 0), command_of(handles, rows)
    register(plan, replace(good, q=good.q.view(Subclass)), lambda: None, 100)
    for other in (good, replace(good, q=good.q.view(Subclass)), replace(good, q=good.q.tolist())):
        assert not accepted(plan, other, 100)
