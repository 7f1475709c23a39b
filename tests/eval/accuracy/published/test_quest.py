"""Quest's bounds, compared with plain loops."""

import numpy as np

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import quest


def test_bounds_are_upper_bounds_of_products():
    seen = draw(s=100)
    low, high = quest.extremes(seen.k)
    assert low.shape == (2, 7, 64)
    made = quest.bounds(seen.q, low, high)
    products = seen.q @ seen.k.transpose(0, 2, 1)
    for page in range(7):
        part = slice(16 * page, 16 * page + 16)
        assert (products[:, :, part].max(-1) <= made[:, :, page] + 1e-3).all()
        each = np.maximum(seen.q * seen.k[:, None, part].min(2), seen.q * seen.k[:, None, part].max(2))
        np.testing.assert_allclose(made[:, :, page], each.sum(-1), rtol=1e-4)


def test_whole_pages_and_bytes_by_hand():
    seen = draw(s=324, recent=4)
    answer = quest.quest(seen, 1 / 2)
    pages = answer.attended[:, :320].reshape(2, 20, 16)
    assert (pages.all(-1) == pages.any(-1)).all()
    assert answer.nbytes == 2 * 20 * 256 + answer.attended.sum() * 256
