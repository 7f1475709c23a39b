"""Page plans of tables that methods keep in flash.

partner of: ftl/kv/reader.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl, UncorrectableReadError


def test_tables_begin_at_pages_and_end_within_one(small_drive):
    ftl, page = Ftl(small_drive), small_drive.geometry.page_bytes
    plan = ftl.table_pages(np.array([page, 0, page + 1, 3 * page - 7]))
    assert plan.ends.tolist() == [1, 1, 3, 6]
    assert plan.useful.tolist() == [page, page, 1, page, page, page - 7]
    assert plan.useful_bytes == 5 * page - 6
    assert (plan.nbytes >= plan.useful).all() and (plan.nbytes <= page).all()
    assert not plan.stored and plan.ppns.max() < small_drive.geometry.lanes
    assert ftl.table_pages(np.zeros(2, np.int64)).ppns.size == 0


@pytest.mark.parametrize(("codeword_bytes", "crosses"), [(None, 512), (128, 128)])
def test_whole_codewords_of_a_selection_cross_the_channel(small_drive, codeword_bytes, crosses):
    ftl = Ftl(replace(small_drive, timing=replace(small_drive.timing, codeword_bytes=codeword_bytes)))
    (handle,) = ftl.create(1, 1, 1, LAYOUTS["fp16"].paged(512, 16, 4))
    rows = np.ones((64, 1, 16), np.float16)
    ftl.append([handle], 0, np.array([64]), rows, rows, 0)
    view = ftl.view([handle], 0)
    plan = ftl.token_pages(view, view.k_slots, np.array([[0, 1]], np.int32), np.array([2]))
    assert (plan.useful.tolist(), plan.nbytes.tolist(), plan.ends.tolist()) == ([64], [crosses], [1])


def test_error_names_what_was_lost_and_why():
    assert str(UncorrectableReadError([3, 5])).startswith("sequences 3, 5: flash data with more errors")
    assert str(UncorrectableReadError([], "logical page 7")).startswith("logical page 7: flash data")
    error = UncorrectableReadError([3], why="the disk is gone")
    assert (str(error), error.handles) == ("sequences 3: the disk is gone", [3])


def test_pages_of_all_tokens_are_planned_once_for_k_and_once_for_v(small_drive):
    """Other slots, and other counts, are planned each time."""
    ftl = Ftl(small_drive)
    (handle,) = ftl.create(1, 1, 1, LAYOUTS["fp16"].paged(512, 16, 4))
    rows = np.ones((64, 1, 16), np.float16)
    ftl.append([handle], 0, np.array([64]), rows, rows, 0)
    view, maps = ftl.view([handle], 0), ftl.sequence(handle).maps
    everything = np.arange(64, dtype=np.int32)[None]
    plans = []
    for name, slots in (("k", view.k_slots), ("v", view.v_slots)):
        plan = ftl.token_pages(view, slots, everything, view.seq_lens)
        assert plan.ppns.tolist() == maps[name].flash_slots().tolist()
        assert ftl.token_pages(view, slots, everything, view.seq_lens) is plan
        assert ftl.token_pages(view, slots.copy(), everything, view.seq_lens) is not plan
        part = ftl.token_pages(view, slots, everything, np.array([3]))
        assert part.ppns.tolist() == plan.ppns[:1].tolist()
        plans.append(plan)
    assert not set(plans[0].ppns.tolist()) & set(plans[1].ppns.tolist())
