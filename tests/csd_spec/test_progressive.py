"""Arrangement of pages of progressive precision, for every head size and page size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_spec import LAYOUTS
from csd_spec.progressive import LANES, LINE, MAX_T, Progressive
from tests.properties import examples

BITS = {"progressive": (2.5, 2), "progressive4": (4.0, 4)}
PAGES = st.sampled_from((512, 4096, 16384))


@pytest.mark.parametrize(
    ("d", "bits", "tokens", "m", "D", "T", "value_tokens", "n"),
    [
        (64, (2.5, 2), 2048, 64, 80, 176, 224, 31),
        (128, (2.5, 2), 2048, 128, 160, 80, 112, 15),
        (128, (2.5, 2), 32768, 64, 80, 176, 224, 15),
        (80, (2.5, 2), 2048, 80, 112, 128, 176, 24),
        (96, (4.0, 4), 2048, 96, 192, 64, 72, 20),
        (256, (4.0, 4), 2048, 64, 128, 112, 112, 7),
        (576, (2.5, 2), 2048, 116, 160, 80, 112, 2),
    ],
)
def test_common_heads_have_expected_page_forms(d, bits, tokens, m, D, T, value_tokens, n):
    """A long context has longer groups of fewer channels."""
    form = Progressive.for_context(4096, d, bits, tokens)
    assert (form.m, form.D, form.T, form.value_tokens, form.n) == (m, D, T, value_tokens, n)


@settings(max_examples=examples(200))
@given(
    page_bytes=PAGES,
    head_dim=st.integers(1, 700),
    name=st.sampled_from(sorted(BITS)),
    tokens=st.integers(1, 1 << 18),
    latent=st.booleans(),
)
def test_forms_of_every_head_fit_their_pages(page_bytes, head_dim, name, tokens, latent):
    try:
        form = Progressive.for_context(page_bytes, head_dim, BITS[name], tokens, latent)
    except ValueError as error:
        assert f"head_dim = {head_dim}" in str(error)
        return
    k_bits, v_bits = BITS[name]
    parts = -(-head_dim // form.m)
    assert form.m <= 128 and (parts - 1) * form.m < head_dim <= parts * form.m
    assert form.D % LANES == 0 and form.k_bits * form.m <= 2 * form.D < k_bits * form.m + 2 + 2 * LANES
    assert form.header_bytes % LINE == 0 and form.header_bytes >= 5 * form.m
    assert form.T % LANES == 0 and LANES <= form.T <= MAX_T
    assert form.header_bytes + form.T * form.D // 4 <= page_bytes
    assert form.T == MAX_T or form.header_bytes + (form.T + LANES) * form.D // 4 > page_bytes, "no room is left"
    assert form.value_tokens % form.value_block == 0 and form.value_block * v_bits == 32
    assert form.sizes_bytes >= 2 * form.value_tokens and form.value_header - form.sizes_bytes >= form.m
    assert form.value_header + form.value_tokens // form.value_block * LINE * form.value_lines <= page_bytes
    lines = [1 + (0 if latent else -(-n // head_dim)) + (2 - latent) * n for n in (form.n, form.n + 1)]
    assert form.refined_bytes == lines[0] * head_dim <= page_bytes < lines[1] * head_dim
    assert form.buffers * form.waiting >= form.n and form.waiting * 2 * head_dim <= page_bytes
    layout = LAYOUTS[f"{name}{'-latent' * latent}"].paged(page_bytes, head_dim, form.m)
    assert (layout.progressive, layout.n, layout.T, layout.embedding_pages) == (form, form.n, form.T, parts)


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "head_dim", "reason"),
    [
        (0.5, 2, 64, "bits = 0.5, 2"),
        (9, 2, 64, "bits = 9, 2"),
        (2.5, 3, 64, "bits = 2.5, 3"),
        (2.5, 8, 64, "bits = 2.5, 8"),
        (2.5, 2, 3000, "head_dim = 3000: its codes do not fit"),
        (2.5, 2, 0, "head_dim = 0"),
    ],
)
def test_invalid_progressive_form_is_refused(k_bits, v_bits, head_dim, reason):
    with pytest.raises(ValueError, match=reason):
        Progressive(4096, head_dim, k_bits, v_bits, max(1, head_dim // 32))


@pytest.mark.parametrize(
    ("name", "d", "least", "most"),
    [
        ("progressive", 128, 0.68, 0.72),
        ("progressive4", 128, 0.79, 0.84),
        ("progressive-latent", 576, 0.90, 0.93),  # DeepSeek's
    ],
)
def test_capacity_is_a_known_share_of_fp16(name, d, least, most):
    """Refined, score and value pages of a token together, as a share of its rows in FP16."""
    layout = LAYOUTS[name].form(4096, d, 32768)
    form = layout.progressive
    page_bytes = 4096 * (1 / form.n + layout.embedding_pages * (1 / form.T + 1 / form.value_tokens))
    assert least < page_bytes / (2 * form.parts * d) < most
