"""How planes fill pages, for every head size and page."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_spec import KvLayout
from csd_spec.attention import storage_of
from csd_spec.planes import Planes, bits_of, is_lossy, number_of
from ftl import LAYOUTS


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
    layout = KvLayout(page_bytes=page_bytes, head_dim=head_dim, m=form.m, bits=bits, kind=number_of(bits, exact=False))
    assert (layout.planes, layout.n, layout.T) == (form, form.n, form.T)


def test_numbers_say_bits_and_what_is_kept():
    assert [number_of(bits, exact=False) for bits in (2, 3, 4)] == [34, 35, 36]
    kept = (False, False), (True, False), (False, True)
    for bits, (exact, latent), bf16 in product((2, 3, 4), kept, (False, True)):
        number = number_of(bits, exact, bf16, latent)
        assert bits_of(number) == bits and is_lossy(number) is not exact
        form = LAYOUTS[number].form(4096, 64, 2048)
        assert form.bf16 is bf16 is (storage_of(number) == "bf16") and form.latent is latent
    assert not any(bits_of(number) or is_lossy(number) for number in (0, 4, 8, 16, 32, 33, 37, 40, 53, 63, 66, 77))


@pytest.mark.parametrize(("bits", "head_dim"), [(1, 64), (5, 64), (2, 3000)])
def test_what_does_not_exist_or_fit_is_refused(bits, head_dim):
    with pytest.raises(ValueError, match=r"bits = |head_dim = "):
        Planes.for_context(4096, head_dim, bits, 100)
