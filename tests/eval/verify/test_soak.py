"""All kinds of work at once for some seconds; growth and wrong results are detected."""

from dataclasses import replace

import pytest

from vcsd.progress import no_tick
from vcsd_eval.verify import soak
from vcsd_eval.verify.soak import MAX_ANONYMOUS_BYTES, ProcessUsage, bench_soak, by_tenth, failed, growth

USAGE = ProcessUsage(anonymous_bytes=1 << 30, flash_bytes=1 << 25, descriptor=80, thread=30, mount=2, run_folder=6)


@pytest.mark.slow
@pytest.mark.usefixtures("own_run_dir")
def test_soak_is_correct_and_leaks_nothing(monkeypatch):
    monkeypatch.setattr(soak, "MAX_ROWS", 256)
    monkeypatch.setattr(soak, "WAYS", ("inproc", "process"))
    found = bench_soak(0.01, drives=1, tokens=6, seed=1, tick=no_tick)
    assert found["rounds"] == soak.LEAST_ROUNDS
    assert (found["wrong_tokens"], found["wrong_reads"]) == (0, 0)
    assert found["ways"] == "inproc, process"
    assert found["tokens"] == 3 * 2 * 3 * 2 * 6  # rounds, ways, decodes, rows, tokens
    assert (found["kills"], found["snapshots"]) == (3 * 2, 3 * 2)
    assert (found["descriptor_growth"], found["mount_growth"], found["run_folder_growth"]) == (0, 0, 0)


def test_growth_is_difference_of_medians():
    grown = replace(USAGE, anonymous_bytes=USAGE.anonymous_bytes + 5, descriptor=81)
    noise = replace(USAGE, anonymous_bytes=0, thread=500)
    rounds = [[noise] * 3, [USAGE, noise, USAGE], [noise] * 3, [grown, noise, grown]]
    assert growth(rounds) == {
        "anonymous_growth_bytes": 5,
        "flash_growth_bytes": 0,
        "descriptor_growth": 1,
        "thread_growth": 0,
        "mount_growth": 0,
        "run_folder_growth": 0,
    }


def test_long_soak_uses_growth_of_last_third():
    """Growth during warm-up does not count; growth after it does, even in small steps."""
    sizes = [min(number, 60) for number in range(90)], list(range(90))
    flat, growing = ([[replace(USAGE, anonymous_bytes=size)] for size in each] for each in sizes)
    assert growth(flat)["anonymous_growth_bytes"] == 5  # within the tenth that ends the warm-up
    assert growth(growing)["anonymous_growth_bytes"] == 30
    assert by_tenth(growing) == [8, 17, 26, 35, 44, 53, 62, 71, 80, 89]


@pytest.mark.parametrize("name", ["descriptor_growth", "thread_growth", "wrong_tokens", "wrong_reads"])
def test_wrong_tokens_or_growth_fail_the_soak(name):
    well = {"wrong_tokens": 0, "wrong_reads": 0, **growth([[USAGE]] * 3)}
    assert not failed(well | {"anonymous_growth_bytes": MAX_ANONYMOUS_BYTES - 1})
    assert failed(well | {"anonymous_growth_bytes": MAX_ANONYMOUS_BYTES})
    assert failed(well | {name: 1})
