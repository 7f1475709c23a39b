"""Value types of the vocabulary check their fields and derive the right values.

partner of: csd_spec/_bounds.py, csd_spec/arrays.py, csd_spec/attention.py, csd_spec/commands.py, csd_spec/device.py,
csd_spec/drive.py, csd_spec/model.py, csd_spec/presets.py, csd_spec/sparf.py, csd_spec/status.py
"""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_spec import (
    LAYOUTS,
    AttentionConfig,
    Completion,
    CompressionBudget,
    DriveError,
    DriveSpec,
    FixedBudget,
    FlashCounters,
    Link,
    ModelShape,
    SparFParams,
    Status,
)
from csd_spec.presets import BLOCK_SSDS, DRIVES, INSTCSD_ZYNQ7045_8CH


def test_papers_drive_has_printed_geometry():
    g = INSTCSD_ZYNQ7045_8CH.geometry
    assert (g.capacity_bytes, g.lanes, g.superblock_pages) == (2 << 40, 256, 256 * 512)


@pytest.mark.parametrize("field", ["channels", "pages_per_block", "page_bytes"])
def test_geometry_names_the_bad_field(field):
    with pytest.raises(ValueError, match=f"^{field}: must be .*, got 0 "):
        replace(INSTCSD_ZYNQ7045_8CH.geometry, **{field: 0})


@pytest.mark.parametrize(("m", "T"), [(2, 1024), (4, 512), (8, 256)])
def test_layout_has_papers_group_sizes(m, T):
    layout = LAYOUTS["fp16"].paged(4096, 128, m)
    assert (layout.n, layout.T, layout.embedding_pages) == (16, T, 128 // m)


def test_layout_of_odd_head_sizes():
    assert LAYOUTS["fp16"].paged(4096, 80, 8).n == 25
    assert LAYOUTS["fp16"].paged(4096, 100, 8).embedding_pages == 13
    with pytest.raises(ValueError, match="m = 3"):
        LAYOUTS["fp16"].paged(4096, 128, 3)


@pytest.mark.parametrize(("tokens", "m"), [(256, 8), (2048, 4), (32768, 2)])
def test_longer_contexts_get_fewer_channels_a_page(tokens, m):
    assert LAYOUTS["fp16"].form(4096, 128, tokens).m == m


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_page_of_codes_has_all_channels_whatever_the_context(name):
    assert {LAYOUTS[name].form(4096, 128, tokens).m for tokens in (256, 2048, 32768)} == {128}


@pytest.mark.parametrize(
    ("c", "convention", "expected"),
    [
        (8, "paper", SparFParams(16, 192, 48)),
        (8, "bytes", SparFParams(16, 96, 24)),
        (1, "paper", SparFParams(128, 1536, 384)),
        (1, "bytes", SparFParams(128, 1536, 384)),
        (1000, "paper", SparFParams(1, 2, 1)),
    ],
)
def test_compression_sets_sparf_budget(c, convention, expected):
    assert CompressionBudget(c, convention).at(1536, 128) == expected


@given(st.floats(1, 64), st.sampled_from(["paper", "bytes"]), st.integers(1, 5000), st.integers(1, 256))
def test_budget_of_any_compression_stays_in_range(c, convention, seq_len, head_dim):
    params = CompressionBudget(c, convention).at(seq_len, head_dim)
    assert 1 <= params.r <= head_dim
    assert 1 <= params.k <= seq_len


@pytest.mark.parametrize("c", [0.5, 0, -1, float("nan"), float("inf")])
def test_compression_below_one_is_refused(c):
    with pytest.raises(ValueError, match=r"at least 1|finite"):
        CompressionBudget(c)


def test_fixed_budget_short_sequence_and_wide_r():
    budget = FixedBudget(SparFParams(8, 100, 25))
    assert budget.at(10, 64) == SparFParams(8, 10, 10)
    with pytest.raises(ValueError, match="r = 8"):
        budget.at(10, 4)


def test_invalid_head_counts_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        ModelShape(name="x", layers=1, q_heads=6, kv_heads=4, head_dim=64)
    with pytest.raises(ValueError, match="must be at most head_dim = 64"):
        ModelShape(name="x", layers=1, q_heads=4, kv_heads=4, head_dim=64, v_head_dim=65)
    for v_head_dim in (1, 63, 64):
        ModelShape(name="x", layers=1, q_heads=4, kv_heads=4, head_dim=64, v_head_dim=v_head_dim)


def test_staged_bytes_cross_twice():
    direct = Link(bytes_per_s=10**9, command_ns=0)
    staged = replace(direct, staging_bytes_per_s=2 * 10**9)
    assert direct.transfer_ns(1000) == 1000
    assert staged.transfer_ns(1000) == 1500


def test_presets_round_trip_by_name_and_text():
    for name, drive in DRIVES.items():
        assert drive.name == name
        assert DriveSpec.from_dict(asdict(drive)) == drive
    assert all(ssd.name == name for name, ssd in BLOCK_SSDS.items())
    with pytest.raises(ValueError, match=r"^wheels: no such field"):
        DriveSpec.from_dict(asdict(INSTCSD_ZYNQ7045_8CH) | {"wheels": 4})


def test_slow_filter_limits_channel_rate():
    fast, slow = INSTCSD_ZYNQ7045_8CH, INSTCSD_ZYNQ7045_8CH
    slow = replace(slow, engine=replace(slow.engine, nfc_bytes_per_cycle=1))
    assert fast.channel_timing.channel_bytes_per_s == 1_400_000_000
    assert slow.channel_timing.channel_bytes_per_s == 285_000_000


def test_counters_add_up():
    one = FlashCounters(pages_read=1, pages_programmed=2, fetched_bytes=3, useful_bytes=4)
    assert one + one == FlashCounters(pages_read=2, pages_programmed=4, fetched_bytes=6, useful_bytes=8)
    assert Completion(status=Status.SUCCESS, submit_ns=5, finish_ns=12).latency_ns == 7


def test_an_error_names_its_drive_by_number_or_name():
    assert str(DriveError(3, Status.READ_ONLY, "worn")) == "drive 3: read only: worn"
    assert str(DriveError("csd0", Status.PATH_LOST, "gone")) == "drive csd0: path lost: gone"


def test_a_status_has_nvmes_type_and_code():
    for status, kind, code in ((Status.INVALID_FIELD, 0, 0x02), (Status.UNRECOVERED_READ_ERROR, 2, 0x81)):
        assert (status >> 8, status & 0xFF) == (kind, code)
    assert Status.UNKNOWN_SEQUENCE >> 8 == 7  # vendor specific


def test_attention_has_budget_and_layout_name():
    assert AttentionConfig("dense", CompressionBudget(1)).at(100, 64) == SparFParams(64, 100, 25)
    with pytest.raises(ValueError, match="layout = 0"):
        AttentionConfig(layout=0)
