"""Systems that are compared, and what is run of each: a trace on a machine at a load and an objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from eval.serving.machines import drives
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import ServingCost
from kv_cache.engine import Policy, serve
from kv_cache.metrics import summary
from kv_cache.policies.orbitflow import POLICIES, Planner
from kv_cache.trace import Trace
from vcsd.progress import Tick, no_tick

PARTS = 20  # of a run, that are told of


@dataclass(frozen=True, slots=True)
class System:
    """A policy, and the drives that it has. layout: that of K and V in them."""

    policy: Policy
    drives: int = 0
    layout: str = "fp16"

    def on(self, cost: ServingCost) -> ServingCost:
        """A machine with these drives."""
        return replace(cost, drives=drives(self.drives, self.layout)) if self.drives else cost


SYSTEMS = {
    "host only": System(Planner(pauses=False)),
    "+ 1 drive": System(Planner(pauses=False, drives=True), 1),
    "+ 4 drives": System(Planner(pauses=False, drives=True), 4),
    "orbitflow": System(POLICIES["orbitflow"]),
    "orbitflow, strict": System(Planner(late=0)),
    "ours": System(Planner(late=0, drives=True), 1, "planes2"),
}
OTHERS = {name: System(POLICIES[name]) for name in POLICIES if name not in SYSTEMS}


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


def run(given: Run, tick: Tick = no_tick) -> dict[str, Any]:
    """What came of a run; ticks PARTS times."""
    system, told = (SYSTEMS | OTHERS)[given.system], 0

    def tell(left: int) -> None:
        nonlocal told
        while told < PARTS * left // len(given.trace.requests):
            told += 1
            tick(None)

    served = serve(given.trace, system.on(given.cost), system.policy, given.slo_s, given.admission, tell)
    row = {"system": given.system, "load": given.load, "slo_scale": given.scale, "trace": given.trace.name}
    return row | summary(served)
