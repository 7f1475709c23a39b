"""Layouts as values: their codes, the layout that stores a model's values, and user-defined layouts.

partner of: csd_spec/layouts/layout.py, csd_spec/layouts/table.py
"""

from itertools import product

import pytest

from csd_spec.codecs import FP8, FP16
from csd_spec.layouts import LAYOUTS, Group, KvLayout, layout_of, layouts, load_layouts, resolve, table

FILE = """
from csd_spec import LAYOUTS, Group, KvLayout
from csd_spec.codecs import FP16

GROUPS = Group("k", "k", "rows"), Group("v", "v", "rows")
LAYOUTS["keys"] = KvLayout(name="keys", code={code}, rows=FP16, groups=GROUPS)
"""
ROWS = Group("k", "k", "rows"), Group("v", "v", "rows")
COARSE = ("progressive", (2.5, 2)), ("progressive4", (4.0, 4))  # bits of K and of V


def test_layout_codes_equal_those_of_earlier_releases():
    codes = {name: layout.code for name, layout in LAYOUTS.items()}
    assert len(set(codes.values())) == len(codes) == 23
    assert {
        "fp16": 16,
        "bf16": 3,
        "fp8": 6,
        "int8": 8,
        "int4-bf16": 68,
        "latent": 5,
        "latent-bf16": 7,
        "plain": 1,
        "opaque": 2,
    }.items() <= (codes.items())
    kinds = (37, 0, 0, 0), (53, 0, 1, 0), (101, 1, 0, 0), (117, 1, 1, 0), (165, 0, 0, 1), (229, 1, 0, 1)
    for (number, (name, coarse)), (code, bf16, exact, latent) in product(enumerate(COARSE), kinds):
        layout = LAYOUTS[f"{name}{'-bf16' * bf16}{'-exact' * exact}{'-latent' * latent}"]
        assert (layout.code, layout.coarse, layout.bits) == (code + number, coarse, 16)
        assert (layout.keeps_rows, layout.latent, layout.rows.value) == (exact, latent, "bf16" if bf16 else "fp16")
        assert bool(layout.lossy) != exact, "exact layouts lose nothing"
        assert [group.name for group in layout.groups][-3:] == ["refined", "scores", "values"]


@pytest.mark.parametrize(
    ("asked", "storage", "bf16", "latent", "found"),
    [
        ("fp16", None, False, False, "fp16"),
        ("fp16", None, True, False, "bf16"),
        ("fp16", "fp8", False, False, "fp8"),
        ("fp16", None, True, True, "latent-bf16"),
        ("fp16", "fp16", True, True, "latent"),
        ("latent", None, False, True, "latent"),
        ("bf16", None, False, False, "bf16"),
        ("bf16", None, False, True, "latent-bf16"),
        ("int4", None, True, False, "int4-bf16"),
        ("plain", None, True, False, "plain"),
        ("progressive4", "bf16", False, False, "progressive4-bf16"),
        ("progressive4", None, True, True, "progressive4-bf16-latent"),
        ("progressive-exact", None, True, False, "progressive-bf16-exact"),
        ("progressive-bf16", None, False, True, "progressive-bf16-latent"),
    ],
)
def test_resolve_finds_the_member_of_a_family(asked, storage, bf16, latent, found):
    assert resolve(asked, storage, bf16, latent).name == found


@pytest.mark.parametrize(
    ("asked", "storage", "latent", "reason"),
    [
        ("int5", None, False, "layout = 'int5': must be one of fp16, "),
        ("latent", None, False, "V is not a part of K in this model: use fp16"),
        ("int8", None, True, "V is a part of K in this model: use progressive, progressive4, fp16"),
        ("progressive-exact", None, True, "V is a part of K"),
        ("fp16", "fp8", True, "layout fp16 stores fp16, bf16: use one of these"),
        ("int8", "fp8", False, "layout int8 stores fp16, bf16: use one of these"),
    ],
)
def test_resolve_refuses_with_the_reason(asked, storage, latent, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(asked, storage, False, latent)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"code": 0}, "code = 0: must be 1 to 255"),
        ({"groups": ROWS[1:]}, "one named k is needed"),
        ({"coarse": (2.5, 2)}, "coarse is needed with groups of scores, and with these alone"),
        ({"groups": (*ROWS, Group("scores", "k", "scores"))}, "coarse is needed with groups of scores"),
        ({"rows": FP8, "groups": (*ROWS, Group("embedding_k", "k", "channels", 8))}, "codes of 8 bits"),
    ],
)
def test_layout_invalid_field_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        KvLayout(**{"name": "mine", "code": 240, "rows": FP16, "groups": ROWS} | fields)


def test_layouts_of_file_leave_shipped_table_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_OF_FILES", {})
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(code=240))
    load_layouts(file)
    assert layout_of(240).name == "keys" and list(layouts()) == [*LAYOUTS, "keys"]
    load_layouts(None)
    other = tmp_path / "other.py"
    other.write_text(FILE.format(code=16))
    with pytest.raises(ValueError, match=r"other.py: layout keys, code 16: is taken"):
        load_layouts(other)
    other.write_text(FILE.format(code=240).replace('"keys"', '"again"'))
    with pytest.raises(ValueError, match=r"layout again, code 240: is taken by layout keys"):
        load_layouts(other)


def test_page_without_room_for_a_channel_of_a_token_is_refused() -> None:
    coded = KvLayout(name="coded", code=240, rows=FP16, groups=(*ROWS, Group("embedding_k", "k", "channels", 8)))
    assert coded.paged(512, 64, 64).T == 4
    with pytest.raises(ValueError, match="m = 64: a page of 256 bytes has no room for one token's channels"):
        coded.paged(256, 64, 64)
