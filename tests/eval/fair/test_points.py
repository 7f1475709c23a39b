"""partner of: eval/fair/points.py, eval/fair/map.py, eval/fair/map_picture.py, eval/fair/plain_ssd.py"""

from dataclasses import replace

import pytest

from vcsd_eval.fair import map as fair_map
from vcsd_eval.fair.map_picture import picture
from vcsd_eval.fair.plain_ssd import plain_rate
from vcsd_eval.fair.points import (
    AXES,
    CSD,
    PLAIN,
    RIVALS,
    SYSTEMS,
    boundary,
    points_along,
    points_of_plane,
    points_of_work,
    rates,
)
from vcsd_eval.papers.instinfer.fill import Fill
from vcsd_eval.papers.instinfer.systems import BATCHED_DENSE, OURS, SPARF


def point(**given):
    return fair_map.Base(**{"context": 8192, "batch": 16, **given}).point


def setup(**given):
    return replace(point().setup, **{"input": 1024, "output": 1024, **given})


def test_lengths_are_one_per_eighth_of_decode():
    lengths = setup().points
    assert [(length - 1024) // 128 for length in lengths] == list(range(8))


def test_dense_attention_reads_at_channel_rate():
    given = setup()
    shape, drive = given.model.shape, given.drive
    steps = Fill(given, BATCHED_DENSE, 16, 1).steps()
    nbytes = steps.pages * drive.geometry.page_bytes
    assert nbytes == pytest.approx(16 * 1536 * shape.kv_bytes_per_token, rel=0.01)
    assert steps.units_s["flash_token"] == pytest.approx(nbytes / (8 * 1.4e9), rel=0.03)


def test_pages_scale_with_batch_and_divide_by_drives():
    given = setup()
    for system in (SPARF, OURS):
        one, two, shared = (Fill(given, system, *where).steps().pages for where in ((64, 1), (128, 1), (64, 2)))
        assert two == pytest.approx(2 * one, rel=0.02)  # fewer rows find room in DRAM
        assert shared == pytest.approx(one / 2, rel=0.02)


def test_plain_ssd_rate_is_its_slowest_path():
    given = setup()
    assert plain_rate(given, 1) == given.drive.link.bytes_per_s
    assert plain_rate(given, 1, 1e5) == 1e5 * 4096
    assert plain_rate(given, 16) == given.host.gpu_link_gb_per_s * 1e9 / 16


def test_map_point_beyond_drive_capacity_is_refused():
    with pytest.raises(ValueError, match="8 KV heads"):
        point(drives=9)
    with pytest.raises(ValueError, match="more than the drives hold"):
        point(batch=1024, context=1 << 19)


def test_systems_without_room_for_all_tokens_have_no_rate():
    at = replace(point(), batch=1024).with_context(1 << 19)
    assert [SYSTEMS[name](at) for name in (CSD, PLAIN, "host")] == [None] * 3
    decoding = replace(setup(), input=8192, output=8192)  # 1 GiB of a prompt, 2 GiB in the end
    half = replace(point(), setup=decoding, batch=40)
    assert SYSTEMS["host"](half) is not None
    assert SYSTEMS["host"](replace(half, batch=60)) is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "dense", "batch": 4},
        {"model": "opt-13b", "drives": 4},
        {"model": "qwen3-32b", "gpu": "8xh100", "host": "pcie5"},
    ],
)
def test_closed_forms_are_within_a_tenth_of_the_model(given):
    ties = [boundary(point(**given), rival) for rival in RIVALS]
    known = [tie["error_percent"] for tie in ties if tie["error_percent"] is not None]
    assert len(known) >= 1
    assert max(map(abs, known)) < 10


def test_winner_changes_at_the_tie():
    at = point()
    tie = boundary(at, PLAIN)["model_gb_s"] * 1e9
    slower, faster = (rates(replace(at, plain_rate=rate * tie)) for rate in (0.8, 1.25))
    assert slower[CSD] > slower[PLAIN]
    assert faster[PLAIN] > faster[CSD]


def test_no_tie_if_gpu_hides_both():
    assert boundary(point(gpu="a6000", model="opt-13b", context=64, batch=1), "host")["model_gb_s"] is None


def test_gpu_is_fastest_unless_no_sequence_fits():
    assert SYSTEMS["gpu"](point(context=1 << 20)) is None
    assert rates(point(gpu="8xh100"))["best"] == "gpu"


def test_every_axis_has_points_that_differ_from_the_base():
    at = point()
    rows = list(points_along(at))
    assert {where["axis"] for where, _ in rows} == set(AXES)
    assert all(sum(where["axis"] == axis for where, _ in rows) > 1 for axis in AXES)
    dense = [where["axis"] for where, _ in points_along(point(method="dense"))]
    assert "budget" not in dense


def test_the_picture_has_both_maps():
    at = point()
    result = {"plane": [{**where, **rates(each)} for where, each in points_of_plane(at)]}
    result["work"] = [{**where, **rates(each)} for where, each in points_of_work(at)]
    assert len(picture(result, at).axes) == 3  # one is the color bar


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="method = 'x': must be one of ours, dense"):
        point(method="x")
