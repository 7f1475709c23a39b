"""Energy is the sum of its units, within the range of every constant."""

from dataclasses import replace

import pytest

from csd_spec.presets import INSTCSD_OVERLAPPED
from vcsd_eval.lifetime.drive import DriveCounts, RequestTally
from vcsd_eval.lifetime.energy import BOUNDS, Prices, ReplayWork, constants, dollars, joules, units
from vcsd_eval.papers.profiles import Model

TALLY = RequestTally(requests=1)
TALLY.add(10_000, 100, 4_000)
COUNTS = DriveCounts(TALLY, 1000, 100, 1110, 2, (0, 1.0, 2))
KINDS = ("engine", "in drives", "plain SSD", "host memory")


def work_of(kind, layout="", counts=COUNTS):
    return ReplayWork(kind, layout, counts, Model.load("llama-3-8b"), INSTCSD_OVERLAPPED, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_total_is_sum_and_bounds_are_ordered(kind):
    result = joules(work_of(kind))
    assert result["low"]["total"] < result["value"]["total"] < result["high"]["total"]
    for bound in BOUNDS:
        by_unit = units(work_of(kind), constants().at(bound))
        assert result[bound]["total"] == pytest.approx(sum(by_unit.values()) * 1e6 / 100)


def test_context_crosses_link_unless_attended_in_drives():
    at = constants().at("value")
    crossing = {kind: units(work_of(kind), at)["link"] for kind in KINDS}
    context = TALLY.context_tokens * 131_072 * at["link_pj"] * 1e-12
    assert TALLY.context_tokens == 100 * 10_050
    assert crossing["host memory"] - crossing["engine"] == pytest.approx(context)
    assert crossing["plain SSD"] == crossing["host memory"]
    assert crossing["in drives"] - crossing["engine"] < 0.01 * context


def test_host_memory_uses_no_flash_and_drives_no_host_memory():
    at = constants().at("value")
    assert sum(units(work_of("host memory"), at)[unit] for unit in ("page sense", "page program", "erase")) == 0
    assert units(work_of("in drives"), at)["DRAM"] == 0
    assert [unit for unit, each in units(work_of("engine"), at).items() if not each] == ["engine"]


def test_progressive_senses_its_share():
    at = constants().at("value")
    whole, part = (units(work_of("in drives", name), at)["page sense"] for name in ("plain", "progressive"))
    page_j = INSTCSD_OVERLAPPED.timing.read_ns * 1e-9 * at["sense_w"]
    assert (whole - part) / page_j == pytest.approx(0.8 * TALLY.context_tokens * 131_072 / 4096)


def test_programs_cost_programmed_pages():
    at = constants().at("value")
    twice = replace(COUNTS, programmed_pages=2220)
    once_j, twice_j = (units(work_of("engine", counts=each), at)["page program"] for each in (COUNTS, twice))
    assert twice_j == pytest.approx(2 * once_j)


def test_dollars_follow_prices_and_life():
    free = Prices(0, 0, 0, 0, 5)
    work = work_of("engine")
    assert dollars(work, free, 1, 1e9, 0) == 0
    drives = replace(free, drive_dollars=100.0)
    assert dollars(work, drives, 0.5, 1e9, 0) == pytest.approx(8 * 100 / 0.5 / 1e3)
    assert dollars(work, drives, 50, 1e9, 0) == pytest.approx(8 * 100 / 5 / 1e3)  # replaced anyway
    memory = replace(free, dram_dollars_per_gb=4.0)
    assert dollars(work_of("host memory"), memory, 1, 1e9, 1e12) == pytest.approx(4000 / 5 / 1e3)


def test_constants_have_ranges_and_sources():
    for name, constant in constants().constants.items():
        ends = sorted((constant.low, constant.high))
        assert ends[0] < constant.value < ends[1], name
        assert len(constant.source) > 30 or constant.source.startswith("assumed"), name
