"""How planes fill pages, for every head size and page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_spec import LAYOUTS
from csd_spec.planes import Planes


def test_the_forms_of_common_heads():
    form = Planes.for_context(4096, 64, 2, 2048)
    assert (form.m, form.T, form.rows, form.n) == (64, 224, 33, 31)
    form = Planes.for_context(4096, 128, 2, 2048)
    assert (form.m, form.T, form.rows, form.n) == (128, 96, 72, 15)
    form = Planes.for_context(4096, 128, 2, 32768)
    assert (form.m, form.T, form.n) == (64, 224, 15), "a long context has longer groups"


@given(st.sampled_from((512, 4096, 16384)), st.integers(1, 512), st.sampled_from((2, 3, 4)), st.integers(1, 1 << 18))
def test_what_fits_fills_no_more_than_a_page(page_bytes, head_dim, bits, tokens):
    try:
        form = Planes.for_context(page_bytes, head_dim, bits, tokens)
    except ValueError as error:
        assert f"head_dim = {head_dim}" in str(error)
        return
    assert form.header_bytes + form.rows * form.T // 2 <= page_bytes
    assert 2 * head_dim * (form.n + 1) <= page_bytes
    assert form.T % 32 == 0 and bits * form.m <= 4 * form.rows <= 8 * form.m
    assert form.m * -(-head_dim // form.m) >= head_dim
    layout = LAYOUTS[f"planes{bits}"].paged(page_bytes, head_dim, form.m)
    assert (layout.planes, layout.n, layout.T) == (form, form.n, form.T)


@pytest.mark.parametrize(("bits", "head_dim"), [(1, 64), (5, 64), (2, 3000)])
def test_what_does_not_exist_or_fit_is_refused(bits, head_dim):
    with pytest.raises(ValueError, match=r"bits = |head_dim = "):
        Planes.for_context(4096, head_dim, bits, 100)
