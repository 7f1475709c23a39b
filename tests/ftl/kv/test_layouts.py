"""Layouts: the shipped ones in numbers, and a new one: a file, and a line in the table.

partner of: ftl/kv/layouts/group_map.py, ftl/kv/layouts/token.py,
ftl/kv/layouts/embedding.py, ftl/kv/layouts/coded.py, ftl/kv/layouts/packing.py
"""

import numpy as np
import pytest

from csd_spec import LAYOUTS, Group, KvLayout
from csd_spec.codecs import FP16
from csd_spec.layouts import layout_of
from ftl import Ftl, maps_of, round_to_codec
from ftl.flash.tag import PageKind
from ftl.kv.layouts.embedding import EmbeddingMap
from ftl.kv.layouts.group_map import POISON, PackedMap
from ftl.kv.layouts.packing import pack_channels, pack_channels_blocked
from ftl.kv.layouts.token import TokenMap

H, D = 2, 16


class SignMap(PackedMap):
    """One bit of each value of K, n tokens a page; written when a group is full."""

    source, primary, scattered = "k", False, True

    def __init__(self, form, layers, heads):
        self.per_group, self.streams = form.n, heads
        super().__init__(PageKind.FREE, form, layers, heads)

    def can_buffer(self, group):
        return False

    def pack(self, rows):
        by_head = rows.transpose(1, 0, 2).reshape(self.heads, -1, self.per_group * self.layout.head_dim)
        return np.packbits(by_head >> 15, axis=2).view(np.uint16)

    def fill(self, content, buffers, position, rows):
        raise AssertionError("it never waits")

    fill_nan = fill


ROWS = Group("k", "k", "rows"), Group("v", "v", "rows")
SIGNS = KvLayout(name="signs", code=240, rows=FP16, groups=(*ROWS, Group("signs", "k", SignMap)))


@pytest.fixture
def signs(monkeypatch):
    monkeypatch.setitem(LAYOUTS, "signs", SIGNS)
    return SIGNS


def test_layout_codes_are_those_of_commands():
    names = {layout.code: layout.name for layout in LAYOUTS.values()}
    assert {
        1: "plain",
        2: "opaque",
        3: "bf16",
        5: "latent",
        6: "fp8",
        7: "latent-bf16",
        16: "fp16",
        8: "int8",
        4: "int4",
        37: "progressive",
        53: "progressive-exact",
        72: "int8-bf16",
        68: "int4-bf16",
        102: "progressive4-bf16",
        117: "progressive-bf16-exact",
        165: "progressive-latent",
        230: "progressive4-bf16-latent",
    }.items() <= names.items()
    for name, layout in LAYOUTS.items():
        assert layout.name == name and layout_of(layout.code) is layout
        assert list(maps_of(layout.form(4096, 128, 2048), 1, H)) == [group.name for group in layout.groups]


@pytest.mark.parametrize("form", ["token", "embedding"])
@pytest.mark.parametrize(("d", "m"), [(10, 4), (12, 8), (16, 2), (12, 12)])
@pytest.mark.parametrize(("position", "tokens"), [(0, 24), (3, 1), (3, 21), (7, 150), (4, 64)])
def test_rows_are_in_the_pages_of_their_map(form, d, m, position, tokens):
    layout, generator = LAYOUTS["fp16"].paged(256, d, m), np.random.default_rng(0)
    mapped = TokenMap(PageKind.K, "k", layout, 1, H) if form == "token" else EmbeddingMap(layout, 1, H)
    rows = generator.integers(0, 1 << 15, (tokens, H, d)).astype(np.uint16)
    groups, parts = -(-(position + tokens) // mapped.per_group), mapped.streams // H
    pages = np.full((mapped.streams * groups, 128), POISON)
    at = generator.permutation(pages.shape[0]).reshape(mapped.streams, groups)
    mapped.write(pages, at, position, rows)
    written = 0
    for token, head, channel in np.ndindex(rows.shape):
        group, row = divmod(position + token, mapped.per_group)
        if form == "token":
            page, value = at[head, group], row * d + channel
        else:
            page, value = at[head * parts + channel // m, group], channel % m * layout.T + row
        assert pages[page, value] == rows[token, head, channel]
        written += 1
    assert (pages != POISON).sum() == written == rows.size


@pytest.mark.parametrize("layout", ["fp16", "bf16", "fp8", "int8", "int4", "int4-bf16", "latent", "progressive"])
@pytest.mark.parametrize(("page_bytes", "d"), [(512, 16), (512, 12), (1024, 20), (512, 10)])
def test_full_groups_use_the_bytes_that_their_map_states(layout, page_bytes, d):
    """Of no more than these, and of all of a page that is not cleared before it is packed."""
    form = LAYOUTS[layout].form(page_bytes, d, 512)
    for mapped in maps_of(form, 1, H).values():
        if not mapped.programmed:
            continue
        width = 2 if mapped.source == "kv" else 1
        rows = np.random.default_rng(0).integers(0, 1 << 14, (2 * mapped.per_group, H, width * d)).astype(np.uint16)
        at = np.arange(2 * mapped.streams).reshape(mapped.streams, 2)
        one, other = (np.full((at.size, page_bytes // 2), before, np.uint16) for before in (0, 0xFFFF))
        for pages in (one, other):
            mapped.write(pages, at, 0, rows)
        used = one.view(np.uint8) == other.view(np.uint8)
        last = int(np.flatnonzero(used.any(0))[-1])
        assert last // 2 == (mapped.group_bytes - 1) // 2, "pages are packed in values of 2 bytes"
        assert mapped.fills_pages <= used.all()
        if type(mapped) in (TokenMap, EmbeddingMap) and form.bits == 16:
            assert mapped.fills_pages == used.all(), "a page that is filled needs no clearing"


@pytest.mark.parametrize("layout", ["fp16", "bf16", "fp8", "latent", "progressive", "progressive-latent"])
@pytest.mark.parametrize("position", [0, 1, 7, 11])
def test_buffered_rows_after_a_position_become_nan(layout, position):
    """Those before stay, and so do the buffers of others."""
    form, generator = LAYOUTS[layout].form(512, D, 128), np.random.default_rng(0)
    erased = POISON if form.rows.exact else form.rows.decode(np.full(form.row_bytes, 0xFF, np.uint8), D)[0]
    for mapped in maps_of(form, 1, H).values():
        if not (mapped.primary or type(mapped) is EmbeddingMap):
            continue
        content = generator.integers(0, 1 << 14, (mapped.streams + 2, 256)).astype(np.uint16)
        mapped.buffers[0] = generator.permutation(mapped.streams + 2)[: mapped.streams]
        rows = generator.integers(0, 1 << 14, (12, H, D)).astype(np.uint16)
        mapped.fill(content, mapped.buffers[0], 0, rows)
        before = content.copy()
        mapped.fill_nan(content, mapped.buffers[0], position)
        others = np.setdiff1d(np.arange(mapped.streams + 2), mapped.buffers[0])
        np.testing.assert_array_equal(content[others], before[others])
        if mapped.primary:
            stored, cleared = (mapped.buffered_rows(each, 0, 12) for each in (before, content))
        else:
            stored, cleared = (each.reshape(-1, form.m, form.T)[mapped.buffers[0]].T for each in (before, content))
        np.testing.assert_array_equal(cleared[:position], stored[:position])
        assert (cleared[position:] == erased).all()


def test_custom_layout_passes_all_operations(small_drive, signs):
    """Append, fork, crop, flush, collection and recovery; its plane is there for a method to read."""
    ftl, generator = Ftl(small_drive), np.random.default_rng(0)
    form = signs.form(small_drive.geometry.page_bytes, D, 512)
    (handle,) = ftl.create(1, 1, H, form)
    k, v = (generator.standard_normal((150, H, D)).astype(np.float16) for _ in range(2))
    for first in range(0, 150, 50):
        part = slice(first, first + 50)
        ftl.append([handle], 0, np.array([50]), k[part], v[part], 0)
    child = ftl.fork(handle)
    ftl.crop(handle, 0, 70, 0)
    for _ in range(20):  # garbage for the collector
        (other,) = ftl.create(1, 1, H, form)
        ftl.append([other], 0, np.array([150]), k, v, 0)
        ftl.free([other], 0)
    ftl.flush(0)
    ftl.nand.power_on()
    ftl = Ftl(small_drive, ftl.nand)
    for sequence, length in ((handle, 70), (child, 150)):
        stored_k, stored_v, _ = ftl.read_back(sequence, 0)
        np.testing.assert_array_equal(stored_k, k[:length])
        np.testing.assert_array_equal(stored_v, v[:length])
        view = ftl.view([sequence], 0)
        full = length // form.n
        pages = ftl.nand.content[view.maps["signs"][:, 0, :full]][..., : form.n * D // 8]
        bits = np.unpackbits(pages, axis=2).reshape(H, full * form.n, D)
        np.testing.assert_array_equal(bits.transpose(1, 0, 2), np.signbit(k[: full * form.n]))
        assert ftl.embedding_pages(view, np.zeros((H, 1), np.int32)).ppns.size == -(-length // form.n) * H - H


@pytest.mark.parametrize("layout", ["bf16", "fp8", "latent", "latent-bf16"])
def test_other_layouts_survive_power_loss(small_drive, layout):
    """Append, fork, crop, collection and recovery; of latent rows K is kept, and is V as well."""
    ftl, generator = Ftl(small_drive), np.random.default_rng(0)
    form = LAYOUTS[layout].form(small_drive.geometry.page_bytes, D, 512)
    (handle,) = ftl.create(1, 1, H, form)
    k, v = (generator.integers(0, 0x7F00, (150, H, D)).astype(np.uint16).view(np.float16) for _ in range(2))
    for first in range(0, 150, 50):
        part = slice(first, first + 50)
        ftl.append([handle], 0, np.array([50]), k[part], v[part], 0)
    child = ftl.fork(handle)
    ftl.crop(handle, 0, 70, 0)
    for _ in range(20):  # garbage for the collector
        (other,) = ftl.create(1, 1, H, form)
        ftl.append([other], 0, np.array([150]), k, v, 0)
        ftl.free([other], 0)
    ftl.flush(0)
    ftl.nand.power_on()
    ftl = Ftl(small_drive, ftl.nand)
    for sequence, length in ((handle, 70), (child, 150)):
        stored_k, stored_v, plan = ftl.read_back(sequence, 0)
        kept_k, kept_v = round_to_codec(form, k), round_to_codec(form, k if form.latent else v)
        np.testing.assert_array_equal(stored_k.view(np.uint16), kept_k[:length].view(np.uint16))
        np.testing.assert_array_equal(stored_v.view(np.uint16), kept_v[:length].view(np.uint16))
        pages = plan.ppns.size
        assert pages == length // form.n * H * (1 if form.latent else 2)


def test_pages_of_each_width_have_their_own_kind():
    """Recovery tells pages of before and after a relayout by their kinds."""
    kinds = {}
    for layout in LAYOUTS.values():
        form = layout.paged(4096, 128, 4)
        for name, mapped in maps_of(form, 2, H).items():
            if name in ("scores", "values"):
                kinds.setdefault((name, form.progressive.v_bits), set()).add(mapped.kind)
    assert kinds == {
        ("scores", 2): {PageKind.SCORES},
        ("scores", 4): {PageKind.SCORES + 1},
        ("values", 2): {PageKind.VALUES},
        ("values", 4): {PageKind.VALUES + 1},
    }


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 21])
@pytest.mark.parametrize("position", [0, 1, 3, 4, 6])
def test_rows_are_packed_in_words_as_one_by_one(tokens, position):
    """Few rows, and rows that begin inside of a word, among them fewer rows than are left of it."""
    m, T, heads, d = 4, 16, 2, 8
    rows = np.random.default_rng(tokens).integers(1, 1 << 16, (tokens, heads, d), np.uint16)
    groups = -(-(position + tokens) // T)
    at = np.arange(heads * (d // m) * groups).reshape(heads * (d // m), groups)
    packed = [np.zeros((at.size, m * T), np.uint16) for _ in range(2)]
    for pack, pages in zip((pack_channels, pack_channels_blocked), packed, strict=True):
        pack(pages, at, m, T, position, rows)
    assert np.count_nonzero(packed[0]) == rows.size
    assert np.array_equal(*packed)
