"""Simulated runs, their number of processes, and the layers that a sample represents.

partner of: eval/papers/instinfer/fill.py
"""

import gc
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as PAPER
from tests.eval.papers.instinfer.setups import in_storage, setup_of, small_setup
from vcsd_eval.papers.instinfer import runs as simulation
from vcsd_eval.papers.instinfer.runs import InStorageCase, default_workers, plan, simulate
from vcsd_eval.papers.instinfer.simulate import SimulatedDrive
from vcsd_eval.papers.instinfer.systems import BATCHED_DENSE, DENSE, PAGED, SPARF
from vcsd_eval.partial_results import ResultCache

CASES = [
    InStorageCase((DENSE, SPARF, PAGED), 2, 1),
    InStorageCase((PAGED, BATCHED_DENSE, SPARF), 2, 1),
    InStorageCase((DENSE,), 2, 5),
]


def results(runs):
    keys = [(system, case.batch, case.drives) for case in CASES for system in case.systems]
    return [asdict(runs.drive(*key)) | {"realtime_factor": None} for key in keys]  # that is wall time


def test_repeated_case_is_simulated_once():
    fills = [(fill.system, fill.drives) for fill in plan(small_setup(), CASES)]
    assert fills == [(DENSE, 1), (SPARF, 1), (PAGED, 1), (BATCHED_DENSE, 1), (DENSE, 5)]


def test_results_are_the_same_in_any_number_of_processes():
    setup, ticks = small_setup(), []
    assert results(simulate(setup, CASES)) == results(simulate(setup, CASES, 2, ticks.append))
    assert len(ticks) == len(plan(setup, CASES)) == 5


def test_simulated_drives_are_released_without_the_garbage_collector(monkeypatch):
    stores = []

    class Watched(SimulatedDrive):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            stores.append(weakref.ref(self.ftl.store))

    monkeypatch.setattr("vcsd_eval.papers.instinfer.fill.SimulatedDrive", Watched)
    gc.disable()
    try:
        simulate(small_setup(output=48), CASES)  # a length of its own: not one that an earlier test has simulated
        assert [store() for store in stores] == [None] * 5
    finally:
        gc.enable()


def test_simulate_on_cluster_gives_same_results(ray_cluster, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4]))  # Ray's workers import from here
    setup, ticks = small_setup(), []
    assert results(simulate(setup, CASES)) == results(simulate(setup, CASES, tick=ticks.append, ray="local"))
    assert len(ticks) == 5


def test_simulate_after_kill_runs_only_the_rest(tmp_path, monkeypatch):
    path, setup, filled, ticks = tmp_path / "kept.jsonl", small_setup(), [], []

    def run(fill, tick):
        if len(filled) == 2:
            raise KeyboardInterrupt
        filled.append(fill)
        return real(fill, tick)

    real = simulation.run
    monkeypatch.setattr(simulation, "run", run)
    with pytest.raises(KeyboardInterrupt):
        simulate(setup, CASES, results=ResultCache(path))
    done = list(filled)
    filled.clear()
    monkeypatch.setattr(simulation, "run", lambda fill, tick: filled.append(fill) or real(fill, tick))
    runs = simulate(setup, CASES, tick=ticks.append, results=ResultCache(path))
    assert len(done) == 2 and len(filled) == 3 and not set(done) & set(filled)
    assert len(ticks) == 5  # kept steps count as done
    assert results(runs) == results(simulate(setup, CASES))
    filled.clear()
    simulate(replace(setup, input=65), CASES, results=ResultCache(path))
    assert len(filled) == 5  # another prompt is another simulation


def test_worker_error_is_raised_in_caller():
    broken = replace(DENSE, name="broken", schedule="none")
    with pytest.raises(KeyError, match="none"):
        simulate(small_setup(), [InStorageCase((broken,), 1, 1), InStorageCase((broken,), 2, 1)], 2)


def test_default_number_of_workers_is_at_least_1():
    assert default_workers() >= 1


def test_sampled_layers_represent_all_layers():
    """2 of 40 layers, for the paper's systems and for ours."""
    sampled, every = setup_of(), setup_of(sampled_layers=None)
    both = [in_storage(setup, (DENSE, SPARF, PAGED), 4, 4) for setup in (sampled, every)]
    for some, all_of_them in zip(*both, strict=True):
        assert some.step.total_s == pytest.approx(all_of_them.step.total_s, rel=0.01)
        assert some.step.total_s != all_of_them.step.total_s
        # with so few pages, a program ends later
        assert some.prefill_s == pytest.approx(all_of_them.prefill_s, rel=0.1)


def test_capacity_check_counts_all_layers():
    """The layers that are sampled would fit."""
    tight = replace(PAPER, geometry=replace(PAPER.geometry, blocks_per_plane=16))
    runs = simulate(
        small_setup(40, drive=tight, input=1024, output=1024),
        [InStorageCase((DENSE, PAGED), 16, 1)],
        tick=(ticks := []).append,
    )
    assert "batch = 16 is too much for 1 drives of 0.0086 TB" in runs.drive(DENSE, 16).reason
    assert len(ticks) == 2
    (fits,) = in_storage(small_setup(10, drive=tight, input=1024, output=1024), (DENSE,), 16, 1)
    assert not fits.reason


@pytest.mark.parametrize("layers", [0, -1])
def test_at_least_one_layer_is_sampled(layers):
    with pytest.raises(ValueError, match=f"sampled_layers = {layers}"):
        small_setup(sampled_layers=layers)
