"""Deadlines met: ours with a drive over OrbitFlow, with and without what else differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from csd_spec import DriveSpec
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from kv_cache.cost import ServingCost
from kv_cache.metrics import summary
from kv_cache.policies.orbitflow import OrbitFlow
from kv_cache.scheduler import Policy
from kv_cache.simulation import simulate
from kv_cache.trace import Trace
from vcsd.progress import Tick
from vcsd_eval.fair.headline import Headline, Ranged, Varied, varied_drive
from vcsd_eval.serving import machines
from vcsd_eval.serving.serving import TraceLoad

COMMAND = "vcsd eval fair --only orbitflow"
LOAD, SCALE = 2.0, 1.5  # of OrbitFlow's public trace, and of its objective
LOADS, SCALES = (2.0, 5.0), (1.0, 1.5, 2.5)  # where ours may lose
PRINTED, STRICT, OURS, EXACT, PLAIN, FLASH_ONLY = "orbitflow", "strict", "ours", "exact", "plain", "flash alone"
CONSTANTS = ("engine.lanes", "timing.channel_bytes_per_s", "link.bytes_per_s")
FLASH_BOUND = 1 << 20  # lanes with which an engine never waits
SYSTEMS = 6
TICKS = SYSTEMS * (3 + 2 * len(CONSTANTS)) + SYSTEMS - 1 + 3 * len(LOADS) * len(SCALES)


@dataclass(frozen=True, slots=True)
class OrbitFlowCase:
    """A trace, and the drives that systems have: their description and the seconds of a call."""

    trace: Trace
    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH
    call_s: float = machines.CALL_S

    def machine(self, system: str) -> ServingCost:
        """The GPU with the drives or SSDs of a system."""
        if system in (PRINTED, STRICT):
            return machines.A5000
        if system == PLAIN:
            return machines.beside_plain_ssds(machines.A5000, 1, self.spec)
        spec = self.spec
        if system == FLASH_ONLY:
            spec = replace(spec, engine=replace(spec.engine, lanes=FLASH_BOUND))
        layout = "fp16" if system == EXACT else "progressive"
        return replace(machines.A5000, drives=replace(machines.drives(1, layout, spec), call_s=self.call_s))


class DeadlineRuns:
    """Share of deadlines met by system, each served when it is first asked for."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self._met: dict[Any, float] = {}

    def met(self, case: OrbitFlowCase, system: str, scale: float = SCALE) -> float:
        """The share of tokens that a system makes before their deadlines."""
        cost = case.machine(system)
        key = case.trace.name, system == PRINTED, cost, scale
        if key not in self._met:
            policy = partial(OrbitFlow, drives=cost.drives is not None, late=1.0 if system == PRINTED else 0.0)
            served = simulate(case.trace, cost, Policy.of(policy), machines.A5000.slo_s(scale))
            self._met[key] = float(summary(served)["deadline_attainment"])
        self.tick(None)
        return self._met[key]

    def ratios(self, case: OrbitFlowCase) -> Mapping[str, float]:
        """Ours over OrbitFlow by condition."""
        strict = self.met(case, STRICT)
        ours, exact, plain = (self.met(case, system) for system in (OURS, EXACT, PLAIN))
        return {
            "as_published": self.met(case, FLASH_ONLY) / self.met(case, PRINTED),
            "same_schedule": ours / strict,
            "same_error": exact / strict,
            "same_hardware_plain_ssd": exact / plain,
        }


def varied(case: OrbitFlowCase) -> list[Varied[OrbitFlowCase]]:
    """Constants of the drive."""
    return [
        Varied("call_s", case.call_s, "s", lambda factor: replace(case, call_s=factor * case.call_s)),
        *varied_drive(case.spec, lambda spec: replace(case, spec=spec), CONSTANTS),
    ]


def headline(file: Path | None, tick: Tick) -> Headline:
    """The headline of OrbitFlow. file: its public traces; None: requests are generated."""
    runs, case = DeadlineRuns(tick), OrbitFlowCase(TraceLoad(trace=file).at(LOAD, machines.A5000))
    ranged = Ranged.of(case, varied(case), runs.ratios)
    met = {system: runs.met(case, system) for system in (PRINTED, STRICT, OURS, EXACT, PLAIN)}
    return Headline(
        what=f"share of deadlines met by ours over OrbitFlow, load {LOAD:g}, objective x {SCALE:g}",
        figures={name: ranged.figure(name, COMMAND) for name in ranged.base}
        | {"same_service": ranged.figure("same_schedule", COMMAND)},
        tornado=[*ranged.tornado("same_schedule"), *ranged.tornado("same_error")],
        loses_at=[*_losses(file, runs)],
        notes=[
            f"trace: {case.trace.name}; deadlines met: " + ", ".join(f"{name} {met[name]:.3f}" for name in met),
            "as_published: OrbitFlow lets one token a step be late before it pauses a request, and has no drive; ours "
            "is strict, and its engine takes no time",
            "same_service: as same_schedule, all serve the same requests to their ends",
        ],
    )


def _losses(file: Path | None, runs: DeadlineRuns) -> list[dict[str, Any]]:
    """Loads and objectives at which the exact drive meets fewer deadlines than a plain SSD, or than no drive."""
    rows = []
    for load in LOADS:
        case = OrbitFlowCase(TraceLoad(trace=file).at(load, machines.A5000))
        for scale in SCALES:
            exact, plain, strict = (runs.met(case, system, scale) for system in (EXACT, PLAIN, STRICT))
            if exact < max(plain, strict):
                other = PLAIN if plain >= strict else STRICT
                where = {"setting": "load, objective", "value": f"{load:g}, x {scale:g}", "other": other}
                rows.append(where | {"ratio": exact / max(plain, strict)})
    return rows
