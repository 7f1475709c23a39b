"""A trace served by several systems on one machine, in modelled time: who keeps its deadlines, and at what price."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from csd_spec.planes import number_of
from eval.experiment import Outcome
from eval.plot import lines, save_figure
from eval.serving.machines import ENGINES, drives
from eval.serving.pages_error import output_error
from serving import trace as traces
from serving.admission import Admission
from serving.engine import Engine
from serving.loop import Policy, serve
from serving.metrics import summary
from serving.placement import BLOCK_TOKENS
from serving.policies import POLICIES, Planner
from serving.trace import Request, Trace
from vcsd.progress import progress
from vcsd.tables import table

LENGTHS = (96, 9216)  # tokens, of what is generated
GENERATED_PER_S = 0.01  # at load 1


@dataclass(frozen=True, slots=True)
class System:
    """A policy, and the drives that it has. bits: the layout of K and V in them."""

    policy: Policy
    drives: int = 0
    bits: int = 16

    def on(self, engine: Engine) -> Engine:
        """An engine with these drives."""
        return replace(engine, drives=drives(self.drives, self.bits)) if self.drives else engine


SYSTEMS = {
    "host only": System(Planner(pauses=False)),
    "+ 1 drive": System(Planner(pauses=False, drives=True), 1),
    "+ 4 drives": System(Planner(pauses=False, drives=True), 4),
    "orbitflow": System(POLICIES["orbitflow"]),
    "orbitflow, strict": System(Planner(late=0)),
    "ours": System(Planner(late=0, drives=True), 1, number_of(2, exact=False)),
}
OTHERS = {name: System(POLICIES[name]) for name in POLICIES if name not in SYSTEMS}
SHOWN = ("deadlines_met", "tbt_attained", "tbt_attained_by_gaps", "tpot_attained", "end_to_end_s", "requests_per_min")


@dataclass(frozen=True, slots=True)
class Load:
    """What is served, and how fast it comes."""

    trace: Annotated[
        Path | None, typer.Option(help="Splitwise CSV, Mooncake JSON lines or OrbitFlow JSON (default: generated)")
    ] = None
    load: Annotated[
        str, typer.Option(help="rates over the trace's own, as 1,2; of OrbitFlow's file, which of its traces: 2.0")
    ] = "2.0"
    slo_scale: Annotated[
        float, typer.Option(min=0.1, max=1000, help="objective over the step of the longest request that fits")
    ] = 1.5
    arrivals: Annotated[
        Literal["seconds", "steps"], typer.Option(help="what a trace in engine steps counts: a slow engine gets fewer")
    ] = "seconds"
    requests: Annotated[int, typer.Option(min=0, max=1 << 20, help="of the trace's first ones; 0 is all")] = 0
    slots: Annotated[int, typer.Option(min=1, max=256, help="requests that decode at once")] = 4
    engine: Annotated[str, typer.Option(help="machine: " + ", ".join(ENGINES))] = "a5000"
    systems: Annotated[str, typer.Option(help="ours, or all: those that OrbitFlow is compared with too")] = "ours"
    picture: Annotated[Path | None, typer.Option(help="draw deadlines met over the load")] = None

    def loads(self) -> list[float]:
        """Rates; raises ValueError for what is none."""
        try:
            found = [float(each) for each in self.load.split(",")]
        except ValueError:
            raise ValueError(f"load = {self.load!r}: needs numbers with commas between them") from None
        if not all(0 < each <= 1000 for each in found):
            raise ValueError(f"load = {self.load!r}: each must be above 0, and at most 1000")
        return found

    def at(self, load: float, engine: Engine) -> Trace:
        """The trace at a load."""
        if self.trace is None:
            count = self.requests or 52
            return traces.generate(count, GENERATED_PER_S * load, LENGTHS, LENGTHS, cv=1.0, longest=12_000)
        if self.trace.suffix == ".json":
            found = traces.load(self.trace, f"lambda{load:.1f}x").head(self.requests)
            return found if self.arrivals == "steps" else found.in_seconds(engine.slo_s(1.0))
        return _faster(traces.load(self.trace).head(self.requests), load)


def _faster(trace: Trace, load: float) -> Trace:
    requests: list[Request] = [replace(each, arrival=each.arrival / load) for each in trace.requests]
    return replace(trace, requests=requests)


def experiment(load: Load) -> Outcome:
    """Requests that come and go, served by several systems: deadlines, tails, throughput."""
    if load.engine not in ENGINES:
        raise ValueError(f"engine = {load.engine!r}: must be one of {', '.join(ENGINES)}")
    if load.systems not in ("ours", "all"):
        raise ValueError(f"systems = {load.systems!r}: must be ours or all")
    systems = SYSTEMS | OTHERS if load.systems == "all" else SYSTEMS
    rows, slo_s = [], 0.0
    errors = {bits: output_error(bits) for bits in sorted({each.bits for each in systems.values() if each.drives})}
    with progress("systems", len(systems) * len(load.loads())) as tick:
        for rate in load.loads():
            engine = ENGINES[load.engine]
            trace = load.at(rate, engine)
            engine = replace(engine, room_blocks=trace.slo_tokens // BLOCK_TOKENS) if trace.slo_tokens else engine
            slo_s = engine.slo_s(load.slo_scale)
            for name, system in systems.items():
                found = summary(serve(trace, system.on(engine), system.policy, slo_s, Admission(slots=load.slots)))
                error = errors[system.bits] if system.drives else 0.0
                rows.append({"system": name, "load": rate, "trace": trace.name, "output_error": error, **found})
                tick(None)
    result = {
        "engine": ENGINES[load.engine].name,
        "arrivals": load.arrivals,
        "slo_scale": load.slo_scale,
        "slo_s": slo_s,
        "systems": {row["system"]: row for row in rows if row["load"] == load.loads()[-1]},
        "rows": rows,
    }
    if load.picture:
        save_figure(lines(rows, "load", "deadlines_met", "system"), load.picture)
    return Outcome(result, [_table(load, rows)])


def _table(load: Load, rows: list[dict[str, Any]]) -> Any:
    shown = [
        (f"{row['load']:g}", row["system"], *(f"{row[key]:.3f}" for key in SHOWN), f"{row['output_error']:.4f}")
        for row in rows
    ]
    columns = ("load", "system", "deadlines met", "TBT", "by gaps", "TPOT", "end to end s", "requests/min", "error")
    title = f"{rows[0]['trace']} on {ENGINES[load.engine].name}, objective x {load.slo_scale:g}"
    return table(title, columns, shown, left=("system",))
