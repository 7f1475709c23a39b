"""Page plans of tables that methods keep in flash.

partner of: ftl/kv/reader.py
"""

import numpy as np

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


def test_error_names_what_was_lost_and_why():
    assert str(UncorrectableReadError([3, 5])).startswith("sequences 3, 5: flash data with more errors")
    assert str(UncorrectableReadError([], "logical page 7")).startswith("logical page 7: flash data")
    error = UncorrectableReadError([3], why="the disk is gone")
    assert (str(error), error.handles) == ("sequences 3: the disk is gone", [3])
