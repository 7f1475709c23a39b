"""Pages of progressive precision in flash: what codes say of K and V, and that they live as other pages do.

partner of: ftl/kv/layouts/planes.py, ftl/kv/layouts/codes.py
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_spec import LAYOUTS
from csd_spec.planes import Planes
from csd_spec.view import in_flash
from eval.verify.crash import scores_agree
from eval.verify.random_host import as_stored
from ftl import Ftl
from ftl.kv.layouts.coded import coded as copied
from ftl.kv.layouts.codes import (
    MAX_BRAIN,
    begin_scores,
    forget_scores,
    put_scores,
    refine,
    refined,
    scored,
    widened,
)
from tests.properties import examples

H, D = 2, 16
LOSSY, EXACT = "planes2", "planes3-exact"
LOSSY_BF16, EXACT_BF16 = "planes2-bf16", "planes3-bf16-exact"
LATENT, LATENT_BF16 = (f"planes2{'-bf16' * bf16}-latent" for bf16 in (False, True))
FORM = Planes.for_context(512, D, 2, 128)
SEEDS = st.integers(0, 1 << 32)
KINDS = pytest.mark.parametrize("bf16", [False, True])


def any_values(seed, *shape, bf16=False):
    """Values of all sizes: random bits, or one of them a hundred times larger than the others, or hardly any."""
    generator = np.random.default_rng(seed)
    if bf16:
        bits = generator.integers(0, 1 << 16, shape, np.uint16)
        few = generator.standard_normal(shape) * 10.0 ** generator.integers(-30, 30) + generator.integers(0, 9)
        few = (few.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.where((bits & 0x7FFF) < 0x7F80, bits, 0xFF7F).astype(np.uint16) if seed % 3 else few
    values = generator.integers(0, 1 << 16, shape, np.uint16).view(np.float16)
    values = np.where(np.isfinite(values), values, np.float16(-65504))
    few = generator.standard_normal(shape) * 10.0 ** generator.integers(-8, 3)
    return (values if seed % 3 else few).astype(np.float16).view(np.uint16)


def values_of(bits, bf16):
    """In float64; of BF16, what is beyond 2^127 counts as nearly that."""
    return np.clip(widened(bits, bf16).astype(np.float64), -MAX_BRAIN, MAX_BRAIN)


def coded(rows, form):
    """A score page of rows (t, m)."""
    pages = np.empty((1, form.page_bytes), np.uint8)
    begin_scores(pages, form, rows[None].view(np.uint16))
    put_scores(pages, form, 0, rows[None].view(np.uint16))
    return pages


@KINDS
@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_a_score_is_within_half_a_step_of_its_channel(bf16, seed):
    """Whatever the values are, outliers and subnormals too; a step is rounded to FP16 itself, or up to BF16."""
    rows, form = any_values(seed, FORM.T, FORM.m, bf16=bf16), replace(FORM, bf16=bf16)
    pages, values = coded(rows, form), values_of(rows, bf16)
    widths = pages[0, 4 * FORM.m : 5 * FORM.m].astype(int)
    spans = values.max(0) - values.min(0)
    if bf16:  # the middle of a channel without bits is rounded to one of its values
        steps = np.where(widths > 0, spans / np.maximum((1 << widths) - 1, 1), 2 * spans)
        slack = steps * 2.0**-8 + 2.0**-133 * (1 << widths) + np.abs(values).max(0) * 2.0**-22
    else:
        steps = np.where(widths > 0, spans / np.maximum((1 << widths) - 1, 1), spans)
        slack = spans * 2.0**-10 + 2.0**-24 * (1 << widths) + np.where(spans > 65504, spans - 65504, 0)
    got = scored(pages, form)[0]
    assert np.isfinite(got).all() and (np.abs(got - values) <= steps / 2 + slack).all()


def test_the_widest_channels_get_the_bits():
    rows = np.random.default_rng(0).standard_normal((FORM.T, FORM.m)).astype(np.float32)
    rows[:, :3] *= 100
    rows[:, 5] = 7
    page = coded(rows.astype(np.float16), FORM)
    widths = page[0, 4 * FORM.m : 5 * FORM.m].astype(int)
    assert widths.sum() == 4 * FORM.rows and widths[5] == 0
    assert widths[:3].min() > widths[3:].max(), "what ranges wider has more bits"
    assert (scored(page, FORM)[0][:, 5] == 7).all(), "what does not vary is exact without any"


@KINDS
@pytest.mark.parametrize("latent", [False, True])
@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_eight_bits_are_within_half_a_step_and_settle(bf16, latent, seed):
    """A step is a power of two, at most 1/63.5 of the channel's largest value; the largest FP16 loses 480."""
    form = replace(FORM, bf16=bf16, latent=latent)
    assert form.n == (31 if latent else 15), "K alone has twice as many tokens to a page"
    rows = any_values(seed, 3, form.n, form.parts * D, bf16=bf16)
    pages = np.zeros((3, 512), np.uint8)
    refine(pages, form, rows)
    back = refined(pages, form)
    values, got = values_of(rows, bf16), widened(back, bf16).astype(np.float64)
    largest = np.abs(values).max(1, keepdims=True)
    assert (np.abs(got - values) <= np.maximum(largest / 127, 2.0 ** (-127 if bf16 else -25))).all()
    again = np.zeros((3, 512), np.uint8)
    refine(again, form, back)
    np.testing.assert_array_equal(refined(again, form), back)


@KINDS
@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_a_copy_in_few_bits_is_within_half_a_step(bf16, bits, seed):
    runs, levels = any_values(seed, 5, 60, bf16=bf16), (1 << bits) - 1
    scale, least, codes = copied(runs, levels, bf16)
    values, (scales, lows) = values_of(runs, bf16), (widened(part, bf16)[:, None] for part in (scale, least))
    span = np.ptp(values, axis=1, keepdims=True)
    slack = span / levels * 2.0**-8 + levels * 2.0**-133 if bf16 else span * 2.0**-11 + levels * 2.0**-25
    error = np.abs(lows + scales.astype(np.float64) * codes - values)
    assert (error <= span / levels / 2 + slack).all()


def test_channels_without_bits_stand_anywhere():
    """Also last, behind a row that is not full; and the page behind has nothing of it."""
    rows = np.zeros((2, FORM.T, FORM.m), np.float16)
    rows[:, :, :3] = np.random.default_rng(3).standard_normal((2, FORM.T, 3))
    pages = np.empty((2, 512), np.uint8)
    begin_scores(pages, FORM, rows.view(np.uint16))
    pages[:, 4 * FORM.m : 4 * FORM.m + 3] = 3, 3, 1  # 7 planes
    scales = np.ptp(rows[:, :, :3].astype(np.float32), axis=1) / (7, 7, 1)
    pages[:, :6] = scales.astype(np.float16).view(np.uint8)
    put_scores(pages, FORM, 0, rows.view(np.uint16))
    assert (np.abs(scored(pages, FORM) - rows).max(1)[:, :3] <= 0.51 * scales).all()
    assert (pages[:, FORM.header_bytes + 2 * FORM.T // 2 :] == 0).all()


def test_a_group_under_construction_is_cut_to_the_ranges_that_it_has():
    rows = np.random.default_rng(1).standard_normal((FORM.T, FORM.m)).astype(np.float16)
    pages = coded(rows[:40], FORM)
    before = scored(pages, FORM)[0, :40].copy()
    put_scores(pages, FORM, 40, 100 * rows[None, 40:50].view(np.float16).view(np.uint16))
    np.testing.assert_array_equal(scored(pages, FORM)[0, :40], before)
    forget_scores(pages, FORM, 40)
    np.testing.assert_array_equal(scored(pages, FORM)[0, :40], before)
    assert (pages[0, FORM.header_bytes :].reshape(FORM.rows, -1)[:, 16 + 8 : 32] & 15 == 0).all()


@pytest.mark.parametrize("layout", [LOSSY, EXACT, LOSSY_BF16, EXACT_BF16, LATENT, LATENT_BF16])
def test_planes_live_as_other_pages_do(small_drive, layout):
    """Append in all sizes, decode, fork, crop, flush, collection and recovery."""
    ftl, generator = Ftl(small_drive), np.random.default_rng(0)
    form = LAYOUTS[layout].form(small_drive.geometry.page_bytes, D, 128)
    (handle,) = ftl.create(1, 1, H, form)
    k, v = (generator.standard_normal((0, H, D)).astype(np.float16) for _ in range(2))

    def grow(tokens):
        nonlocal k, v
        more = [generator.standard_normal((tokens, H, D)).astype(np.float16) for _ in range(2)]
        ftl.append([handle], 0, np.array([tokens]), *more, 0)
        k, v = as_stored(form, len(k), np.concatenate([k, more[0]]), np.concatenate([v, more[1]]))

    def check(which, K, V):
        for got, wanted in zip(ftl.read_back(which, 0)[:2], (K, V), strict=True):
            np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))
        part = range(len(K) // 3, len(K) - 2)
        np.testing.assert_array_equal(ftl.read_back(which, 0, part)[0], K[part.start : part.stop])
        assert scores_agree(ftl, which, 0)

    for tokens in (50, 100, 7, *[1] * 45):
        grow(tokens)
    check(handle, k, v)
    child, forked = ftl.fork(handle), (k.copy(), v.copy())
    for length in (190, 130, 97):
        ftl.crop(handle, 0, length, 0)
        k, v = k[:length], v[:length]
        check(handle, k, v)
    grow(60)
    for _ in range(10):
        (other,) = ftl.create(1, 1, H, form)
        ftl.append([other], 0, np.array([150]), *(np.ones((150, H, D), np.float16) for _ in range(2)), 0)
        ftl.free([other], 0)
    ftl.flush(0)
    ftl.nand.power_on()
    ftl = Ftl(small_drive, ftl.nand)
    check(handle, k, v)
    check(child, *forked)


def test_an_unfinished_group_of_scores_waits_in_dram_and_gives_way(small_drive):
    """The ranges are those of the group before; a sequence shorter than a group has none."""
    form = LAYOUTS[LOSSY].form(512, D, 128)
    rows = np.random.default_rng(2).standard_normal((2 * form.T, H, D)).astype(np.float16)
    for dram_bytes, buffered in ((1 << 20, True), (2 * 2 * H * 512, False)):
        ftl = Ftl(replace(small_drive, dram_bytes=dram_bytes))
        (handle,) = ftl.create(1, 1, H, form)
        ftl.append([handle], 0, np.array([form.T - 1]), rows[: form.T - 1], rows[: form.T - 1], 0)
        assert not ftl.sequence(handle).maps["scores"].buffered(0)
        for token in range(form.T - 1, form.T + 20):
            ftl.append([handle], 0, np.array([1]), rows[token : token + 1], rows[token : token + 1], 0)
        scores = ftl.sequence(handle).maps["scores"]
        assert in_flash(scores.slots[0, :, 0]).all()
        if buffered:
            assert scores.buffered(0)
            page = ftl.buffers.content[scores.buffers[0]]
            np.testing.assert_array_equal(page[:, : 5 * D], ftl.nand.content[scores.slots[0, :, 0], : 5 * D])
            ftl.crop(handle, 0, form.T, 0)
            assert not scores.buffered(0)
        else:
            (other,) = ftl.create(1, 1, H, form)
            ftl.append([other], 0, np.array([1]), rows[:1], rows[:1], 0)
            assert not scores.buffered(0), "K and V of another sequence come first"


def test_scores_of_cropped_tokens_leave_nothing_behind(small_drive):
    """A group under construction, cropped and filled again, is what it is without the cropped tokens."""
    form = LAYOUTS[LOSSY].form(512, D, 128)
    T, generator, ftl = form.T, np.random.default_rng(3), Ftl(small_drive)
    kept, cropped, more = (generator.standard_normal((count, H, D)).astype(np.float16) for count in (T + 10, 8, 5))
    seqs = ftl.create(2, 1, H, form)
    for rows in (kept, more):
        ftl.append([seqs[0]], 0, np.array([len(rows)]), rows, rows, 0)
    for rows in (kept, cropped):
        ftl.append([seqs[1]], 0, np.array([len(rows)]), rows, rows, 0)
    ftl.crop(seqs[1], 0, T + 10, 0)
    ftl.append([seqs[1]], 0, np.array([5]), more, more, 0)
    one, other = (ftl.sequence(seq).maps["scores"] for seq in seqs)
    assert one.buffered(0) and other.buffered(0)
    np.testing.assert_array_equal(ftl.buffers.content[one.buffers[0]], ftl.buffers.content[other.buffers[0]])


def test_capacity_is_six_tenths_of_fp16():
    form = LAYOUTS["planes2"].form(4096, 128, 2048)
    page_bytes = 4096 / form.n + 4096 * form.embedding_pages / form.T
    assert 0.55 < page_bytes / (4 * 128) < 0.65
    form = LAYOUTS[LATENT].form(4096, 576, 32768)  # DeepSeek's
    page_bytes = 4096 / form.n + 4096 * form.embedding_pages / form.T
    assert (form.n, form.T, form.embedding_pages) == (6, 224, 9) and 0.7 < page_bytes / (2 * 576) < 0.75
