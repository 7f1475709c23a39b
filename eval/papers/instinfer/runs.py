"""Results of systems at batch sizes on drives: all that is wanted is simulated first, side by side, and read then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from csd_spec import ModelShape
from csd_spec.layouts import layout_named, resolve
from eval.kept import Kept
from eval.papers.instinfer.simulate import SimulatedDrive
from eval.papers.instinfer.systems import (
    ON_HOSTS,
    Breakdown,
    Constants,
    InStorage,
    Result,
    Setup,
    finish,
)
from eval.sweep import Done, cores, sweep, sweep_on_ray, sweep_rest
from ftl import OutOfSpace, maps_of
from host_driver.sharding import share_out
from vcsd.progress import Tick, no_tick

WORKER_BYTES = 5 << 30  # what one worker may need: batch 256 of OPT-13B's layers on one drive takes 4.4 GB
MOST_PAGES, SAMPLED = 160_000_000, 40_000_000  # that a worker holds; of a part, when it is less than all
Key = tuple[InStorage, int, int]  # system, batch, drives


@dataclass(frozen=True, slots=True)
class Case:
    """Systems that attend in drives, at one batch size."""

    systems: tuple[InStorage, ...]
    batch: int
    drives: int


class Runs:
    """Results of a setup: of host systems as they are asked for, of systems in drives those that were simulated."""

    def __init__(self, setup: Setup, in_storage: dict[Key, Result]) -> None:
        self.setup, self._in_storage = setup, in_storage

    def host(self, system: str, batch: int, drives: int = 1, constants: Constants | None = None) -> Result:
        """A system that attends on the host or the GPU."""
        setup = replace(self.setup, constants=constants) if constants else self.setup
        return ON_HOSTS[system](setup, batch, drives)

    def drive(self, system: InStorage, batch: int, drives: int = 1) -> Result:
        """A system that attends in drives."""
        return self._in_storage[system, batch, drives]

    @property
    def sampled(self) -> dict[str, dict[str, int]]:
        """How many layers' steps were simulated, of how many; nothing where that is all."""
        some, every = len(self.setup.layers), self.setup.model.shape.layers
        return {"layers": {"simulated": some, "of": every}} if some < every else {}


@dataclass(frozen=True, slots=True)
class Fill:
    """Systems that find the same on their drives: what is stored once for all of them, and shared with no other."""

    setup: Setup
    systems: tuple[InStorage, ...]
    batch: int
    drives: int

    @property
    def share(self) -> ModelShape:
        """What the slowest drive has, that with the most."""
        shape = self.setup.model.shape
        kv_heads, q_heads = max((len(each.kv_heads), len(each.q_heads)) for each in share_out(shape, self.drives))
        return replace(shape, kv_heads=kv_heads, q_heads=q_heads)

    @property
    def layout(self) -> str:
        """The layout in which K and V are stored."""
        return resolve(self.systems[0].layout, None, bf16=False, latent=self.setup.model.latent).name

    @property
    def fits(self) -> bool:
        """Whether the drive has pages for all that is written in the end."""
        return self._pages <= self.setup.drive.geometry.pages

    @property
    def sampled(self) -> int:
        """Sequences that are simulated: all, or where that is more than a worker can hold a part, which others are
        like."""
        return self.batch if self._pages <= MOST_PAGES else max(1, self.batch * SAMPLED // self._pages)

    @property
    def _pages(self) -> int:
        """That a drive gets."""
        setup, layout = self.setup, layout_named(self.layout)
        shape, tokens = self.share, setup.input + setup.output
        form = layout.form(setup.drive.geometry.page_bytes, shape.head_dim, tokens)
        maps = maps_of(form, 1, shape.kv_heads).values()
        pages = sum(each.streams * (tokens // each.per_group) for each in maps if each.programmed)
        return shape.layers * self.batch * pages

    @property
    def ticks(self) -> int:
        return len(self.systems) * len(self.setup.points)


def plan(setup: Setup, cases: Iterable[Case]) -> list[Fill]:
    """What is to be filled for cases; what an earlier case has is not simulated again."""
    known: set[Key] = set()
    fills = []
    for case in cases:
        share_out(setup.model.shape, case.drives)
        wanted = dict.fromkeys(case.systems)
        new = [system for system in wanted if (system, case.batch, case.drives) not in known]
        known.update((system, case.batch, case.drives) for system in new)
        for layout in dict.fromkeys(system.layout for system in new):
            mine = tuple(system for system in new if system.layout == layout)
            fills.append(Fill(setup, mine, case.batch, case.drives))
    return fills


def enough(setup: Setup, systems: tuple[InStorage, ...], batch: int) -> int:
    """The fewest drives, a power of two, that hold a batch; as many as can share it where none do."""
    most, drives = setup.model.kv_heads, 1
    while 2 * drives <= most and not all(Fill(setup, (each,), batch, drives).fits for each in systems):
        drives *= 2
    return drives


def count_ticks(setup: Setup, cases: Iterable[Case]) -> int:
    """How often `simulate` ticks."""
    return sum(fill.ticks for fill in plan(setup, cases))


def simulate(
    setup: Setup,
    cases: Iterable[Case],
    workers: int = 1,
    tick: Tick = no_tick,
    ray: str | None = None,
    kept: Kept | None = None,
) -> Runs:
    """Simulate all cases; results are the same for any number of processes.

    Args:
        setup: The model on hardware.
        cases: Systems at batch sizes on drives.
        workers: Processes of this machine.
        tick: Called for each step that is simulated.
        ray: Address of a Ray cluster that simulates instead, a core for each fill.
        kept: Results of an earlier run that was killed, and where new ones go.
    """
    fills = sorted(plan(setup, cases), key=lambda fill: -fill.batch * fill.share.kv_heads * (2 + len(fill.systems)))

    def compute(left: Sequence[Fill], done: Done) -> None:
        for _ in range(sum(fill.ticks for fill in fills) - sum(fill.ticks for fill in left)):
            tick(None)
        if ray:
            sweep_on_ray(run, left, ray, tick, done)
        else:
            sweep(run, left, workers, tick, done)

    each = sweep_rest(fills, kept or Kept(None), compute, _encoded, _decoded)
    keys = ((system, fill.batch, fill.drives) for fill in fills for system in fill.systems)
    return Runs(setup, dict(zip(keys, chain.from_iterable(each), strict=True)))


def _encoded(results: list[Result]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


def _decoded(results: list[dict[str, Any]]) -> list[Result]:
    return [Result(**{**each, "step": Breakdown(**each["step"])}) for each in results]


def run(fill: Fill, tick: Tick = no_tick) -> list[Result]:
    """Fill a drive and simulate the steps of every system on it; those between the points are interpolated."""
    setup, systems = fill.setup, fill.systems
    seconds: list[list[dict[str, float]]] = [[] for _ in systems]
    wall_s, programs_s = [0.0] * len(systems), 0.0
    try:
        tokens = setup.input + setup.output
        if not fill.fits:
            raise OutOfSpace("it has fewer pages")
        drive = SimulatedDrive(setup.drive, fill.share, fill.sampled, tokens, fill.layout)
        scale = fill.batch / fill.sampled
        for point in setup.points:
            grown_s = drive.grow(point)
            programs_s = programs_s or scale * grown_s
            for number, system in enumerate(systems):
                before = drive.wall_s
                units = system.simulate(setup, drive)
                seconds[number].append({unit: scale * s for unit, s in units.items()})
                wall_s[number] += scale * (drive.wall_s - before)
                tick(None)
    except OutOfSpace as error:
        for _ in range(fill.ticks - sum(map(len, seconds))):
            tick(None)
        size = f"{fill.drives} drives of {setup.drive.geometry.capacity_bytes / 1e12:.2g} TB"
        reason = f"batch = {fill.batch} is too much for {size}: {error}"
        return [Result(system=each.name, batch=fill.batch, drives=fill.drives, reason=reason) for each in systems]
    return [_result(fill, *each, programs_s) for each in zip(systems, seconds, wall_s, strict=True)]


def _result(fill: Fill, system: InStorage, units: list[dict[str, float]], wall_s: float, programs_s: float) -> Result:
    """A system's result from the units of its simulated steps."""
    setup = fill.setup
    drives = 1 if setup.model.latent else fill.drives  # that share what is stored
    shipped = setup.kv_bytes(fill.batch, setup.input)
    shipped_s = shipped / drives / setup.drive.link.bytes_per_s
    if setup.network:
        copies = fill.drives if setup.model.latent else 1
        shipped_s = max(shipped_s, copies * shipped / setup.network.bytes_per_s)
    prefill_s = max(setup.prefill_gpu_s(fill.batch), shipped_s, programs_s)  # layer by layer, one under the other
    parts = [system.breakdown(setup, fill.batch, fill.drives, each) for each in units]
    means = (
        float(np.interp(setup.steps, setup.points, [getattr(part, name) for part in parts]).mean())
        for name in (each.name for each in fields(Breakdown))
    )
    device_s = sum(part.kv_s + part.engine_s for part in parts) * len(setup.layers) / setup.model.shape.layers
    middle = units[len(units) // 2]
    more: dict[str, Any] = {"units_s": {unit: s for unit, s in middle.items() if unit != "pages"}}
    more["realtime_factor"], more["simulated_sequences"] = device_s / wall_s, fill.sampled
    return finish(setup, system.name, fill.batch, fill.drives, prefill_s, Breakdown(*means), **more)


def default_workers() -> int:
    """As many as there are cores, and memory for."""
    memory = Path("/proc/meminfo")
    lines = memory.read_text().splitlines() if memory.exists() else []
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), WORKER_BYTES)
    return max(1, min(cores(), free // WORKER_BYTES))
