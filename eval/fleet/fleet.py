"""`vcsd eval fleet`: up to 1,024 computational drives on hosts and a network, under a public trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml

from csd_spec.network import NETWORKS, Network, network_named
from csd_spec.presets import INSTCSD_OVERLAPPED
from eval.experiment import Outcome
from eval.fleet.calibrate import REQUESTS, Bench, calibrate
from eval.fleet.drive_model import SHIPPED, Coefficients, coefficients
from eval.fleet.events import IDLE, RESOURCES, Served, serve
from eval.fleet.machine import Machine
from eval.fleet.workload import Arrivals, backlog, hours_of, period_s
from eval.papers.profiles import Gpu, Model
from eval.public_trace import TracePath, public_trace
from kv_cache.trace import Trace
from vcsd.options import MAX_SEED
from vcsd.tables import flat_table, table

SWEEP_HOURS = 1.0
SWEEP_REQUESTS = 1 << 16  # that wait on a host
MAX_DRIVES, EXTRAPOLATED = 1024, 1 << 16  # drives of an option, and of the sweep while scaling has not ended
LEAST_GAIN = 1.25  # tokens/s of twice the drives; with less, scaling has ended
NO_NETWORK = "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated."""

    trace: TracePath = None
    hours: Annotated[float, typer.Option(min=0.01, max=8784, help="simulated time")] = 24.0
    drives: Annotated[int, typer.Option(min=1, max=MAX_DRIVES, help="computational drives of all hosts")] = 1024
    hosts: Annotated[int, typer.Option(min=1, max=64, help="hosts, each with a GPU; at most one a drive is used")] = 64
    rate: Annotated[float, typer.Option(min=1e-3, max=1e3, help="arrivals a second, over those of the trace")] = 1.0
    batch: Annotated[int, typer.Option(min=1, max=256, help="sequences of a group of drives that share the heads")] = 32
    model: Annotated[str, typer.Option(help="model profile: a name or a YAML file")] = "llama-3-8b"
    gpu: Annotated[str, typer.Option(help="GPU profile of a host: a name, 8xh100, or a YAML file")] = "h100"
    network: Annotated[
        str, typer.Option(help=f"of a host to its drives: {', '.join(NETWORKS)}, or {NO_NETWORK} for PCIe alone")
    ] = "100gbe-rdma"
    oversubscription: Annotated[
        float, typer.Option(min=1, max=64, help="hosts' ports over what the network between carries")
    ] = 1.0
    coefficients: Annotated[
        Path | None, typer.Option(help="YAML file of the drive's coefficients (default: shipped ones)")
    ] = None
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="fit the coefficients to the emulator, and write that file if named")
    ] = False
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the draws from the trace")] = 0


def network_of(setting: Setting) -> Network | None:
    """The port of a host; each gets its part of an oversubscribed network."""
    if setting.network == NO_NETWORK:
        return None
    found = network_named(setting.network)
    return replace(found, bytes_per_s=max(1, round(found.bytes_per_s / setting.oversubscription)))


def hosts_of(setting: Setting, drives: int) -> int:
    """Hosts that are used."""
    return min(setting.hosts, drives)


def machine_of(setting: Setting, trace: Trace) -> Machine:
    """A host; raises ValueError where hosts would differ, or the model is another kind."""
    model, hosts = Model.load(setting.model), hosts_of(setting, setting.drives)
    if setting.drives % hosts:
        raise ValueError(f"drives = {setting.drives}: choose a multiple of the {hosts} hosts")
    if model.latent:
        raise ValueError(f"model {setting.model}: has a latent KV cache: choose one with KV heads")
    gpu = Gpu.some(setting.gpu)
    if model.weight_bytes > gpu.memory_gib * 2**30:
        raise ValueError(f"gpu = {gpu.name}: does not hold the weights of {model.name}: take several, such as 8xh100")
    return Machine(
        model=model,
        gpu=gpu,
        spec=INSTCSD_OVERLAPPED,
        network=network_of(setting),
        fitted=fitted_of(setting, trace),
        drives=setting.drives // hosts,
        slots=setting.batch,
    )


def fitted_of(setting: Setting, trace: Trace) -> Coefficients:
    """The drive's coefficients, fitted now or before."""
    if not setting.calibrate:
        return coefficients(setting.coefficients or SHIPPED)
    command = f"vcsd eval fleet --calibrate --model {setting.model} --trace {trace.name} --seed {setting.seed}"
    bench = Bench(INSTCSD_OVERLAPPED, Model.load(setting.model).shape, setting.seed)
    fitted = calibrate(bench, trace.requests[:REQUESTS], trace.name, command)
    if setting.coefficients:
        setting.coefficients.write_text(yaml.safe_dump(asdict(fitted), sort_keys=False))
    return fitted


def figures(served: Served, arrivals: Arrivals, seconds: float) -> dict[str, Any]:
    """Rates, latencies and the resource that takes most of the time."""
    ttft_s = (served.first_s - arrivals.arrival_s)[~np.isnan(served.first_s)]
    long = ~np.isnan(served.end_s) & (arrivals.output_tokens > 1)
    tpot_s = (served.end_s - served.first_s)[long] / (arrivals.output_tokens[long] - 1)
    shares = served.spent_s.sum(axis=0) / served.spent_s.sum()
    return {
        "tokens_per_s": served.made.sum() / seconds,
        "ttft_s": _percentiles(ttft_s),
        "tpot_s": _percentiles(tpot_s),
        "requests": int(arrivals.arrival_s.size),
        "ended": int((~np.isnan(served.end_s)).sum()),
        "utilisation": 1 - float(shares[IDLE]),
        "bound": bound_of(served),
        "shares": dict(zip(RESOURCES, shares.tolist(), strict=True)),
    }


def bound_of(served: Served) -> str:
    """The resource that takes most of the time that hosts work; `arrivals` if they are idle most of the time."""
    spent = served.spent_s.sum(axis=0)
    return "arrivals" if spent[IDLE] > spent.sum() / 2 else busiest(served)


def busiest(served: Served) -> str:
    """The same without time that hosts are idle."""
    return RESOURCES[1 + int(served.spent_s.sum(axis=0)[IDLE + 1 :].argmax())]


def _percentiles(values: np.ndarray) -> dict[str, float | None]:
    if not values.size:
        return {"p50": None, "p99": None}
    return {f"p{at}": float(np.percentile(values, at)) for at in (50, 99)}


def sweep(setting: Setting, machine: Machine, trace: Trace) -> list[dict[str, Any]]:
    """Tokens/s by drives, with more requests waiting than hosts can serve, until twice the drives give too little.

    Hosts are alike and share nothing, so one is simulated.
    """
    waiting = backlog(trace, SWEEP_REQUESTS, setting.seed)
    rows, drives, of_host = list[dict[str, Any]](), 1, dict[int, Served]()
    while drives <= EXTRAPOLATED and not (drives > MAX_DRIVES and ends_of(rows)[0]):
        hosts = hosts_of(setting, drives)
        if drives % hosts == 0:
            each = drives // hosts
            if each not in of_host:
                one = machine.with_drives(each)
                of_host[each] = serve(one.requests(waiting), one.costs(), 1, one.groups, one.slots, SWEEP_HOURS * 3600)
            served = of_host[each]
            rate = hosts * served.made.sum() / (served.spent_s[0, 1:].sum())
            rows.append({"drives": drives, "hosts": hosts, "tokens_per_s": rate, "bound": busiest(served)})
        drives *= 2
    return rows


def ends_of(rows: Sequence[dict[str, Any]]) -> tuple[int | None, str]:
    """The drives from which on twice as many give too little, and what takes most of the time of those."""
    for row, more in pairwise(rows):
        if more["tokens_per_s"] < LEAST_GAIN * row["tokens_per_s"]:
            return row["drives"], more["bound"]
    return None, f"does not end within {rows[-1]['drives']} drives: {rows[-1]['bound']}" if rows else ""


def experiment(setting: Setting) -> Outcome:
    """Tokens/s, TTFT and TPOT of a fleet of computational drives under a trace, and where scaling ends."""
    trace = public_trace(setting.trace)
    machine = machine_of(setting, trace)
    fitted = machine.fitted
    arrivals = hours_of(trace, setting.hours, setting.rate, setting.seed)
    machine.check_room(arrivals)
    hosts, seconds = hosts_of(setting, setting.drives), setting.hours * 3600
    served = serve(machine.requests(arrivals), machine.costs(), hosts, machine.groups, machine.slots, seconds)
    rows = sweep(setting, machine, trace)
    ends_at, why = ends_of(rows)
    result = figures(served, arrivals, seconds) | {
        "drives": setting.drives,
        "hosts": hosts,
        "groups_of_a_host": machine.groups,
        "idle_drives": hosts * (machine.drives - machine.groups * machine.group),
        "ends_at": ends_at,
        "why": why,
        "extrapolated": (ends_at or rows[-1]["drives"]) >= MAX_DRIVES,
        "capacity_tokens_per_s": next((row["tokens_per_s"] for row in rows if row["drives"] == setting.drives), None),
        "sweep": rows,
        "swept": f"one host, {SWEEP_REQUESTS} requests wait from the beginning, at most {SWEEP_HOURS:g} h; beyond "
        f"{MAX_DRIVES} drives is extrapolated; scaling ends where twice the drives give less than {LEAST_GAIN:g} times "
        "the tokens/s",
        "resampled": f"{trace.name}: {period_s(trace) / 3600:.2f} h once as it is, then its arrivals again with "
        f"prompt and answer lengths drawn from it with repetition, seed {setting.seed}; prefixes are not reused",
        "deviation_percent": fitted.deviation_percent,
        "worst_percent": fitted.worst_percent,
        "coefficients": asdict(fitted),
        "setting": {name: str(each) if isinstance(each, Path) else each for name, each in asdict(setting).items()}
        | {"trace": trace.name},
    }
    return Outcome(result, _shown(result), _NOTES)


_NOTES = (
    "GPU, link, network and drives take turns; two half batches would hide some of them under one another",
    "attention is dense on FP16 keys and values; prefixes are not reused, so every prompt is prefilled and written",
    "deviations are of the drive's step alone, at the first requests of the trace that the coefficients name",
)


def _shown(result: dict[str, Any]) -> list[Any]:
    def ms(values: dict[str, float | None]) -> str:
        return ", ".join("-" if each is None else f"{1e3 * each:,.1f}" for each in values.values())

    flat = {
        key: result[key] for key in ("drives", "hosts", "requests", "ended", "tokens_per_s", "utilisation", "bound")
    }
    flat |= {"ttft p50, p99, ms": ms(result["ttft_s"]), "tpot p50, p99, ms": ms(result["tpot_s"])}
    deviations = ", ".join(f"{each:.1f} at {drives}" for drives, each in result["deviation_percent"].items())
    flat |= {"deviation from the emulator, %": deviations, "scaling ends at": result["ends_at"] or "-"}
    flat |= {"beyond 1,024 drives, extrapolated": result["extrapolated"], "why": result["why"]}
    cells = [
        (str(row["drives"]), str(row["hosts"]), f"{row['tokens_per_s']:,.0f}", row["bound"]) for row in result["sweep"]
    ]
    columns = ("drives", "hosts", "tokens/s", "bound")
    return [flat_table("A fleet (modelled)", flat), table("More drives, requests always wait", columns, cells)]
