"""Systems under comparison, and their runs: a trace on a machine at a load and an objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kv_cache.admission import AdmissionConfig
from kv_cache.cost import ServingCost
from kv_cache.metrics import summary
from kv_cache.policies import POLICIES, PolicyLike
from kv_cache.policies.orbitflow import OrbitFlow
from kv_cache.scheduler import Policy
from kv_cache.simulation import simulate
from kv_cache.trace import Trace
from vcsd.progress import Tick, no_tick
from vcsd_eval.serving.machines import drives

PARTS = 20  # of a run, that are told of


@dataclass(frozen=True, slots=True)
class System:
    """A policy, and its drives. layout: layout of the KV cache in them."""

    policy: PolicyLike
    drives: int = 0
    layout: str = "fp16"

    def on(self, cost: ServingCost) -> ServingCost:
        """A machine with these drives."""
        return replace(cost, drives=drives(self.drives, self.layout)) if self.drives else cost


SYSTEMS = {
    "host only": System(partial(OrbitFlow, pauses=False)),
    "+ 1 drive": System(partial(OrbitFlow, pauses=False, drives=True), 1),
    "+ 4 drives": System(partial(OrbitFlow, pauses=False, drives=True), 4),
    "orbitflow": System(POLICIES["orbitflow"]),
    "orbitflow, strict": System(partial(OrbitFlow, late=0)),
    "ours": System(partial(OrbitFlow, late=0, drives=True), 1, "progressive"),
}
OTHERS = {name: System(POLICIES[name]) for name in ("deepspeed", "flexgen-half", "flexgen+", "slo-aware", "heuristic")}


@dataclass(frozen=True, slots=True)
class Run:
    """A system serves a trace. scale: of the objective. By the system's name, so that it goes to another process."""

    system: str
    load: float
    scale: float
    trace: Trace
    cost: ServingCost
    admission: AdmissionConfig

    @property
    def slo_s(self) -> float:
        return self.cost.slo_s(self.scale)


def run(setting: Run, tick: Tick = no_tick) -> dict[str, Any]:
    """Result of a run; ticks PARTS times."""
    system, told = (SYSTEMS | OTHERS)[setting.system], 0

    def tell(left: int) -> None:
        nonlocal told
        while told < PARTS * left // len(setting.trace.requests):
            told += 1
            tick(None)

    served = simulate(
        setting.trace, system.on(setting.cost), Policy.of(system.policy), setting.slo_s, setting.admission, tell
    )
    row = {"system": setting.system, "load": setting.load, "slo_scale": setting.scale, "trace": setting.trace.name}
    return row | summary(served)
