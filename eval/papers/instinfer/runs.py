"""Results of systems at batch sizes on drives: all cases are simulated concurrently first, and read afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftl import OutOfSpaceError
from host_driver.sharding import assign_heads
from vcsd.progress import Tick, no_tick
from vcsd_eval.papers.instinfer.fill import Fill
from vcsd_eval.papers.instinfer.systems import ON_HOSTS, Breakdown, InStorageSystem, Result, Setup, finish
from vcsd_eval.partial_results import ResultCache
from vcsd_eval.sweep import Done, cores, sweep, sweep_on_ray, sweep_rest

WORKER_BYTES = 5 << 30  # memory of one worker: batch 256 of all layers of OPT-13B on one drive takes 4.4 GB
Key = tuple[InStorageSystem, int, int]  # system, batch, drives


@dataclass(frozen=True, slots=True)
class InStorageCase:
    """Systems that attend in drives, at one batch size."""

    systems: tuple[InStorageSystem, ...]
    batch: int
    drives: int


class Runs:
    """Results of a setup: host systems are computed on demand, systems in drives must have been simulated."""

    def __init__(self, setup: Setup, in_storage: dict[Key, Result]) -> None:
        self.setup, self._in_storage = setup, in_storage

    def host(self, system: str, batch: int, drives: int = 1) -> Result:
        """A system that attends on the host or the GPU."""
        return ON_HOSTS[system](self.setup, batch, drives)

    def drive(self, system: InStorageSystem, batch: int, drives: int = 1) -> Result:
        """A system that attends in drives."""
        return self._in_storage[system, batch, drives]

    @property
    def sampled(self) -> dict[str, dict[str, int]]:
        """Number of simulated layers and of all layers; empty if all are simulated."""
        some, every = self.setup.simulated_layers, self.setup.model.shape.layers
        return {"layers": {"simulated": some, "of": every}} if some < every else {}


def plan(setup: Setup, cases: Sequence[InStorageCase]) -> list[Fill]:
    """Simulations needed by the cases, without duplicates."""
    for case in cases:
        assign_heads(setup.model.shape, case.drives)
    return [*dict.fromkeys(Fill(setup, system, case.batch, case.drives) for case in cases for system in case.systems)]


def enough(setup: Setup, systems: tuple[InStorageSystem, ...], batch: int) -> int:
    """Smallest number of drives, a power of two, that holds a batch; the largest possible number if none does."""
    most, drives = setup.model.kv_heads, 1
    while 2 * drives <= most and not all(Fill(setup, system, batch, drives).fits for system in systems):
        drives *= 2
    return drives


def simulate(
    setup: Setup,
    cases: Sequence[InStorageCase],
    workers: int = 1,
    tick: Tick = no_tick,
    ray: str | None = None,
    results: ResultCache | None = None,
) -> Runs:
    """Simulate all cases; results are the same for any number of processes.

    Args:
        setup: The model on hardware.
        cases: Systems at batch sizes on drives.
        workers: Processes of this machine.
        tick: Called for each system, batch size and number of drives.
        ray: Address of a Ray cluster that simulates instead.
        results: Results of an earlier run that was killed, and where new ones go.
    """
    fills = sorted(plan(setup, cases), key=lambda fill: -fill.sequences * fill.share.kv_heads)

    def compute(left: Sequence[Fill], done: Done) -> None:
        for _ in range(len(fills) - len(left)):
            tick(None)
        if ray:
            sweep_on_ray(run, left, ray, tick, done)
        else:
            sweep(run, left, workers, tick, done)

    outcomes = sweep_rest(fills, results or ResultCache(None), compute, asdict, _decoded)
    return Runs(
        setup, {(fill.system, fill.batch, fill.drives): done for fill, done in zip(fills, outcomes, strict=True)}
    )


def _decoded(result: dict[str, Any]) -> Result:
    return Result(**{**result, "step": Breakdown(**result["step"])})


def run(fill: Fill, tick: Tick = no_tick) -> Result:
    """A system's mean decode step and throughput, or the reason why it cannot run."""
    setup, system = fill.setup, fill.system
    try:
        if not fill.fits:
            raise OutOfSpaceError("it has fewer pages")
        steps = fill.steps()
    except OutOfSpaceError as error:
        size = f"{fill.drives} drives of {setup.drive.geometry.capacity_bytes / 1e12:.2g} TB"
        reason = f"batch = {fill.batch} is too much for {size}: {error}"
        return Result(system=system.name, batch=fill.batch, drives=fill.drives, reason=reason)
    finally:
        tick(None)
    drives = 1 if setup.model.latent else fill.drives  # that share what is stored
    shipped = setup.kv_bytes(fill.batch, setup.input)
    shipped_s = shipped / drives / setup.drive.link.bytes_per_s
    if setup.network:
        copies = fill.drives if setup.model.latent else 1
        shipped_s = max(shipped_s, copies * shipped / setup.network.bytes_per_s)
    prefill_s = max(setup.prefill_gpu_s(fill.batch), shipped_s, steps.program_s)  # layer by layer, one under the other
    step = system.breakdown(setup, fill.batch, fill.drives, steps.units_s)
    more: dict[str, Any] = {"units_s": steps.units_s, "realtime_factor": steps.realtime_factor}
    more["simulated_sequences"] = steps.sequences
    return finish(setup, system.name, fill.batch, fill.drives, prefill_s, step, **more)


def default_workers(worker_bytes: int = WORKER_BYTES) -> int:
    """Number of cores, limited by the available memory.

    Args:
        worker_bytes: Memory that one worker needs.
    """
    memory = Path("/proc/meminfo")
    lines = memory.read_text().splitlines() if memory.exists() else []
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), worker_bytes)
    return max(1, min(cores(), free // worker_bytes))
