"""Seeds of the whole stack under every fault; planted bugs are found, and failed runs are replayed and shortened.

partner of: eval/verify/simulation/disk.py, eval/verify/simulation/drive.py, eval/verify/simulation/host.py,
eval/verify/simulation/link.py, eval/verify/simulation/injected_bugs.py, eval/verify/simulation/prefixes.py,
eval/verify/simulation/world.py
"""

import random

import pytest

from vcsd_eval.verify.simulation.disk import Killed, SimDisk
from vcsd_eval.verify.simulation.injected_bugs import PLANTS
from vcsd_eval.verify.simulation.simulate import bench_simulate, run, shrunk
from vcsd_eval.verify.simulation.world import FAULTS
from vcsd_eval.verify.verify import InjectedBug


def test_simulation_seeds_lose_nothing_under_all_faults():
    result = bench_simulate(60, 0, steps=40)
    assert result["seeds"] == 60 and result["steps"] == 60 * 40
    assert (result["lost"], result["wrong"], result["hangs"], result["failing"]) == (0, 0, 0, [])
    assert set(result["by_kind"]) == set(FAULTS) and all(result["by_kind"].values())


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found_within_200_seeds(plant):
    result = bench_simulate(200, 0, inject_bug=plant, steps=40)
    assert result["lost"] + result["wrong"] + result["hangs"] > 0


def test_unrecorded_fused_step_is_found_by_one_seed_in_four():
    """Two seeds in five find it."""
    assert sum(run(seed, 40, "fused").failed for seed in range(12)) >= 3


def test_every_injected_bug_is_selectable():
    assert {bug.value for bug in InjectedBug} == {"none", *PLANTS}


def test_seed_replays_exactly_and_is_shrunk():
    assert run(5, 40, "none") == run(5, 40, "none")
    result = shrunk(0, 40, "completion")
    assert result["steps"] <= 3 and result["faults"] == [] and "checksum" in result["what"]


@pytest.mark.parametrize("durability", ["process", "host"])
def test_disk_keeps_synced_writes(durability):
    for seed in range(50):
        disk = SimDisk("sim", durability, random.Random(seed))
        file = disk.open("a", 4096)
        file.write(0, b"x" * 1024)
        disk.sync()
        file.write(1024, b"y" * 2048)
        disk.deaths = 0
        with pytest.raises(Killed):
            file.write(3072, b"z" * 1024)
        assert disk.files["a"][:3072] == b"x" * 1024 + b"y" * 2048 and disk.files["a"][3584:] == bytes(512)
        if durability == "process":
            disk.process_died()
            assert disk.files["a"][:3072] == b"x" * 1024 + b"y" * 2048
        else:
            disk.lose_power()
            assert disk.files["a"][:1024] == b"x" * 1024 and set(disk.files["a"][1024:3072]) <= {0, ord("y")}
