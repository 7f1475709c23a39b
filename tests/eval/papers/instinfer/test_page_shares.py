"""Pages that SparF reads, for recorded q, k and v."""

import numpy as np
import pytest

from tests.eval.papers.instinfer.setups import setup_of
from vcsd_eval.accuracy.recorded import Recorded
from vcsd_eval.papers.instinfer.page_shares import page_shares, scaled


def test_page_shares_equal_pages_of_the_selection():
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, heads, 320, 16)).astype(np.float16) for heads in (2, 1, 1))
    shares = page_shares([Recorded(q, k, v)], [1, 8, 16], 16)
    assert shares[1] == 1
    assert shares[16] < shares[8] < 1


def test_scaled_shares_equal_papers_at_one_eighth():
    assert scaled(setup_of(), {2.0: 0.9, 8.0: 0.5, 16.0: 0.25}) == pytest.approx({2: 0.45, 8: 0.25, 16: 0.125})
    assert scaled(setup_of(), {2.0: 0.9, 8.0: 0.125})[2.0] == 1
