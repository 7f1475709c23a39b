"""Forks have what they need of their own."""

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_fork_has_sums_of_its_own(small_drive, has_sums):
    ftl = Ftl(small_drive)
    layout = LAYOUTS["fp16"].paged(small_drive.geometry.page_bytes, 16, 4)
    (handle,) = ftl.create(1, 2, 2, layout)
    parent = ftl.sequence(handle)
    parent.v_sums = np.ones((2, 2, 16), np.float32) if has_sums else None
    child = ftl.sequence(ftl.fork(handle))
    if not has_sums:
        assert child.v_sums is None
        return
    child.v_sums[:] = 7
    assert (parent.v_sums == 1).all()
