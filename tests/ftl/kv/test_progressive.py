"""Pages of progressive precision in flash: they are handled as other pages are, and decode to keys and values within
the precision of their codes.

partner of: ftl/kv/layouts/progressive.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS
from csd_spec.view import in_flash
from ftl import Ftl
from ftl.kv.layouts import maps_of
from ftl.kv.layouts.coarse import begin_scores, put_scores, put_values
from ftl.kv.layouts.progressive import OWN_RANGE
from vcsd_eval.verify.crash import scores_agree, values_agree
from vcsd_eval.verify.random_host import as_stored

H, D = 2, 16
LAYOUTS_OF_ALL_KINDS = (
    "progressive",
    "progressive4-exact",
    "progressive-bf16",
    "progressive4-bf16-exact",
    "progressive-latent",
    "progressive4-bf16-latent",
)


def rows_of(form, tokens, seed=0):
    rows = np.random.default_rng(seed).standard_normal((tokens, H, D)).astype(np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16).view(np.float16) if form.bf16 else rows.astype(np.float16)


@pytest.mark.parametrize("layout", LAYOUTS_OF_ALL_KINDS)
def test_low_bit_pages_pass_all_operations(small_drive, layout):
    """Append in all sizes, decode, fork, crop, flush, collection and recovery."""
    ftl, seed = Ftl(small_drive), iter(range(1000))
    form = LAYOUTS[layout].form(small_drive.geometry.page_bytes, D, 128)
    (handle,) = ftl.create(1, 1, H, form)
    k = v = rows_of(form, 0)

    def grow(tokens):
        nonlocal k, v
        more = [rows_of(form, tokens, next(seed)) for _ in range(2)]
        ftl.append([handle], 0, np.array([tokens]), *more, 0)
        k, v = as_stored(form, len(k), np.concatenate([k, more[0]]), np.concatenate([v, more[1]]))

    def check(which, K, V):
        for got, wanted in zip(ftl.read_back(which, 0)[:2], (K, V), strict=True):
            np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))
        part = range(len(K) // 3, len(K) - 2)
        got = ftl.read_back(which, 0, part)[0]
        np.testing.assert_array_equal(got.view(np.uint16), K[part.start : part.stop].view(np.uint16))
        assert scores_agree(ftl, which, 0) and values_agree(ftl, which, 0)

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


@pytest.mark.parametrize("layout", LAYOUTS_OF_ALL_KINDS)
def test_full_pages_depend_on_rows_not_on_append_sizes(small_drive, layout):
    """With ranges and rests of their own, where rows are kept as they came; whole or token by token."""
    form = LAYOUTS[layout].form(512, D, 128)
    codes, per_group = form.progressive, {"scores": form.T, "values": form.progressive.value_tokens}
    ftl, k, v = Ftl(small_drive), rows_of(form, 130, 1), rows_of(form, 130, 2)
    seqs = ftl.create(2, 1, H, form)
    ftl.append([seqs[0]], 0, np.array([130]), k, v, 0)
    for t in range(130):
        ftl.append([seqs[1]], 0, np.array([1]), k[t : t + 1], v[t : t + 1], 0)
    for seq in seqs if form.keeps_rows else seqs[:1]:
        for name, rows in (("scores", k), ("values", k if form.latent else v)):
            slots = ftl.sequence(seq).maps[name].slots[0]
            for group in range(130 // per_group[name]):
                own = rows[group * per_group[name] :][: per_group[name]].transpose(1, 0, 2).view(np.uint16)
                pages = np.zeros((H, 512), np.uint8)
                if name == "scores":
                    begin_scores(pages, codes, own)
                    put_scores(pages, codes, 0, own)
                else:
                    put_values(pages, codes, 0, own)
                np.testing.assert_array_equal(ftl.nand.content[slots[:, group]].view(np.uint8), pages)


def test_unfinished_score_group_in_dram_is_evictable(small_drive):
    """The ranges are those of the previous group; a sequence shorter than a group has none. V needs none."""
    form = LAYOUTS["progressive"].form(512, D, 128)
    rows = rows_of(form, 2 * form.T, 2)
    for dram_bytes, buffered in ((1 << 20, True), (2 * 2 * H * 512, False)):
        ftl = Ftl(replace(small_drive, dram_bytes=dram_bytes))
        (handle,) = ftl.create(1, 1, H, form)
        ftl.append([handle], 0, np.array([form.T - 1]), rows[: form.T - 1], rows[: form.T - 1], 0)
        maps = ftl.sequence(handle).maps
        assert not maps["scores"].buffered(0) and maps["values"].buffered(0)
        for token in range(form.T - 1, form.T + 20):
            ftl.append([handle], 0, np.array([1]), rows[token : token + 1], rows[token : token + 1], 0)
        scores = maps["scores"]
        assert in_flash(scores.slots[0, :, 0]).all()
        if buffered:
            assert scores.buffered(0)
            page = ftl.buffers.content[scores.buffers[0]]
            np.testing.assert_array_equal(page[:, : 5 * D // 2], ftl.nand.content[scores.slots[0, :, 0], : 5 * D // 2])
            ftl.crop(handle, 0, form.T, 0)
            assert not scores.buffered(0)
        else:
            (other,) = ftl.create(1, 1, H, form)
            ftl.append([other], 0, np.array([1]), rows[:1], rows[:1], 0)
            assert not scores.buffered(0), "K and V of another sequence come first"
            assert not maps["values"].buffered(0)


@pytest.mark.parametrize("name", ["scores", "values"])
def test_codes_of_cropped_tokens_are_overwritten(small_drive, name):
    """A group under construction, cropped and filled again, decodes as if the cropped tokens had never existed."""
    form = LAYOUTS["progressive4"].form(512, D, 128)
    T, ftl = form.T if name == "scores" else form.progressive.value_tokens, Ftl(small_drive)
    rest, cropped, more = (rows_of(form, count, seed) for seed, count in enumerate((T + 10, 8, 8)))
    seqs = ftl.create(2, 1, H, form)
    for seq, behind in ((seqs[0], [more]), (seqs[1], [cropped, more])):
        for number, rows in enumerate((rest, *behind)):
            if number == 2:
                ftl.crop(seq, 0, T + 10, 0)
            ftl.append([seq], 0, np.array([len(rows)]), rows, rows, 0)
    one, other = (ftl.sequence(seq).maps[name] for seq in seqs)
    assert one.buffered(0) and other.buffered(0)
    np.testing.assert_array_equal(ftl.buffers.content[one.buffers[0]], ftl.buffers.content[other.buffers[0]])


@pytest.mark.parametrize("tokens", [OWN_RANGE - 1, OWN_RANGE])
def test_only_a_group_that_begins_with_enough_rows_gets_ranges_of_its_own(tokens):
    """Rows that come later are coded in the ranges of those before, and leave their codes as they are."""
    form = LAYOUTS["progressive"].form(4096, 64, 8192)
    assert form.T >= 2 * OWN_RANGE
    scores, m, header = maps_of(form, 1, H)["scores"], form.m, form.progressive.header_bytes
    rows = np.random.default_rng(0).standard_normal((scores.streams, form.T, m)).astype(np.float16)
    pages = np.zeros((scores.streams, 4096), np.uint8)
    begin_scores(pages, form.progressive, (100 * rows).view(np.uint16))
    before = pages.copy()
    scores.put(pages, 0, rows[:, :tokens].view(np.uint16))
    own = (pages[:, :header] != before[:, :header]).any()
    assert own == (tokens >= OWN_RANGE)
    first = pages.copy()
    scores.put(pages, tokens, rows[:, tokens:].view(np.uint16))
    np.testing.assert_array_equal(pages[:, :header], first[:, :header])
    put_scores(pages, form.progressive, tokens, np.zeros_like(rows[:, tokens:]).view(np.uint16))
    put_scores(first, form.progressive, tokens, np.zeros_like(rows[:, tokens:]).view(np.uint16))
    np.testing.assert_array_equal(pages, first)
