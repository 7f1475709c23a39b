"""`vcsd eval fleet`: up to 1,024 computational drives on hosts and a network, under a public trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from csd_spec.network import NETWORKS, Network, network_named
from csd_spec.presets import INSTCSD_OVERLAPPED
from kv_cache.trace import Trace
from nvmevirt_config.document import dump_yaml
from vcsd.options import MAX_SEED
from vcsd.tables import flat_table, table
from vcsd_eval.experiment import Outcome
from vcsd_eval.fleet.calibrate import REQUESTS, CalibrationBench, calibrate
from vcsd_eval.fleet.drive_model import SHIPPED, Coefficients, coefficients
from vcsd_eval.fleet.events import IDLE, RESOURCES, TPOT, TTFT
from vcsd_eval.fleet.jobs import BACKLOG_REQUESTS, FleetJob, run_jobs
from vcsd_eval.fleet.machine import FleetHost, PrefixReuse, Scheme
from vcsd_eval.fleet.simulation import Served
from vcsd_eval.fleet.workload import period_s
from vcsd_eval.options import RayAddress
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.public_trace import TracePath, public_trace

SWEEP_HOURS = 1.0
MAX_DRIVES, EXTRAPOLATED = 1024, 1 << 16  # drives of an option, and of the sweep while scaling has not ended
LEAST_GAIN = 1.25  # tokens/s of twice the drives; with less, scaling ends
NO_NETWORK = "none"
WAITING: tuple[Literal["no", "trace"], ...] = "no", "trace"  # both runs of a variant


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of the simulation."""

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
    micro_batches: Annotated[
        int, typer.Option(min=1, max=2, help="2: half batches alternate between the GPU and the drives")
    ] = 1
    late_kv: Annotated[
        bool, typer.Option("--late-kv", help="send new keys and values once per step, for all layers together")
    ] = False
    token_shards: Annotated[int, typer.Option(min=1, max=128, help="drives that share the tokens of a KV head")] = 1
    two_level_merge: Annotated[
        bool, typer.Option("--two-level-merge", help="merge token shards in the enclosure of the drives first")
    ] = False
    prefixes: Annotated[
        PrefixReuse, typer.Option(help="reuse of stored prompts: none, local, or copied between groups of drives")
    ] = "none"
    ray: RayAddress = None
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="seed of the draws from the trace")] = 0

    @property
    def scheme(self) -> Scheme:
        """How hosts use their drives."""
        return Scheme(self.micro_batches, self.late_kv, self.token_shards, self.two_level_merge, self.prefixes)


def port_of(network: str, oversubscription: float = 1.0) -> Network | None:
    """The port of a host by name; each host gets its part of an oversubscribed network."""
    if network == NO_NETWORK:
        return None
    network_port = network_named(network)
    return replace(network_port, bytes_per_s=max(1, round(network_port.bytes_per_s / oversubscription)))


def checked_model(name: str) -> Model:
    """A model with KV heads; raises ValueError for another."""
    model = Model.load(name)
    if model.latent:
        raise ValueError(f"model {name}: has a latent KV cache: choose one with KV heads")
    return model


def checked_gpu(name: str, model: Model) -> Gpu:
    """A GPU that holds a model; raises ValueError for another."""
    gpu = Gpu.some(name)
    if model.weight_bytes > gpu.memory_gib * 2**30:
        raise ValueError(f"gpu = {gpu.name}: does not hold the weights of {model.name}: take several, such as 8xh100")
    return gpu


def hosts_of(setting: FleetOptions, drives: int) -> int:
    """Hosts that are used."""
    return min(setting.hosts, drives)


def machine_of(setting: FleetOptions, trace: Trace) -> FleetHost:
    """A host; raises ValueError where hosts would differ, or the model is another kind."""
    model, hosts = checked_model(setting.model), hosts_of(setting, setting.drives)
    if setting.drives % hosts:
        raise ValueError(f"drives = {setting.drives}: choose a multiple of the {hosts} hosts")
    return FleetHost(
        model=model,
        gpu=checked_gpu(setting.gpu, model),
        spec=INSTCSD_OVERLAPPED,
        network=port_of(setting.network, setting.oversubscription),
        fitted=fitted_of(setting, trace),
        drives=setting.drives // hosts,
        slots=setting.batch,
        scheme=setting.scheme,
    )


def fitted_of(setting: FleetOptions, trace: Trace) -> Coefficients:
    """The drive's coefficients, fitted now or before."""
    if not setting.calibrate:
        return coefficients(setting.coefficients or SHIPPED)
    command = f"vcsd eval fleet --calibrate --model {setting.model} --trace {trace.name} --seed {setting.seed}"
    bench = CalibrationBench(INSTCSD_OVERLAPPED, Model.load(setting.model).shape, setting.seed)
    fitted = calibrate(bench, trace.requests[:REQUESTS], trace.name, command)
    if setting.coefficients:
        setting.coefficients.write_text(dump_yaml(asdict(fitted), sort_keys=False))
    return fitted


def figures(served: Served, seconds: float) -> dict[str, Any]:
    """Rates, latencies and the resource that takes most of the time."""
    shares = served.spent_s.sum(axis=0) / served.spent_s.sum()
    return {
        "tokens_per_s": served.made.sum() / seconds,
        "ttft_s": _percentiles(served, TTFT),
        "tpot_s": _percentiles(served, TPOT),
        "requests": served.arrived,
        "ended": int(served.ended.sum()),
        "prompt_tokens": served.input_tokens,
        "reused_tokens": served.reused_tokens,
        "copied_tokens": served.copied_tokens,
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


def _percentiles(served: Served, which: int) -> dict[str, float | None]:
    return {f"p{at}": served.percentile_s(which, at) for at in (50, 99)}


def sizes(setting: FleetOptions) -> list[int]:
    """Drives of the sweep: powers of two up to the largest fleet, multiples of their hosts."""
    powers = (1 << power for power in range(MAX_DRIVES.bit_length()))
    return [drives for drives in powers if drives % hosts_of(setting, drives) == 0]


def size_job(setting: FleetOptions, machine: FleetHost, trace: Trace, drives: int) -> FleetJob:
    """One host of a fleet of a size, which is never idle: hosts are alike and share nothing."""
    each = machine.with_drives(drives // hosts_of(setting, drives))
    return FleetJob(machine=each, hosts=1, trace=trace, hours=SWEEP_HOURS, seed=setting.seed, waiting="drawn")


def row_of(setting: FleetOptions, drives: int, served: Served) -> dict[str, Any]:
    """A row of the sweep."""
    hosts = hosts_of(setting, drives)
    return {"drives": drives, "hosts": hosts, "tokens_per_s": hosts * busy_rate(served), "bound": busiest(served)}


def busy_rate(served: Served) -> float:
    """Tokens per second of a host that is not idle."""
    return float(served.made.sum() / served.spent_s[:, IDLE + 1 :].sum())


def extrapolate(setting: FleetOptions, machine: FleetHost, trace: Trace, rows: list[dict[str, Any]]) -> None:
    """Add sizes beyond the largest fleet until scaling ends: each depends on the one before, so they run here."""
    drives = 2 * rows[-1]["drives"]
    while drives <= EXTRAPOLATED and ends_of(rows)[0] is None:
        (served,) = run_jobs([size_job(setting, machine, trace, drives)], None)
        rows.append(row_of(setting, drives, served))
        drives *= 2


def variants(machine: FleetHost) -> dict[str, Scheme]:
    """The scheme as it is set, and with one change at a time."""
    scheme = machine.scheme
    sharded = {"token_shards": 2}
    changes: dict[str, dict[str, Any]] = {
        "as set": {},
        "half batches alternate": {"micro_batches": 2},
        "keys and values of all layers in one message": {"late_kv": True},
        "tokens of a head on two drives, merged on the host": sharded | {"two_level": False},
        "tokens of a head on two drives, merged in two levels": sharded | {"two_level": True},
        "prefixes reused where they are stored": {"prefixes": "local"},
        "prefixes copied to other drives too": {"prefixes": "copied"},
    }
    if machine.drives < 2 * machine.model.kv_heads:
        changes = {name: change for name, change in changes.items() if change.get("token_shards") != 2}
    return {name: replace(scheme, **change) for name, change in changes.items()}


def variant_jobs(setting: FleetOptions, machine: FleetHost, trace: Trace) -> list[FleetJob]:
    """Two runs of each variant: arrivals of the trace's first period, and all of its requests waiting."""
    hours, hosts = min(setting.hours, period_s(trace) / 3600), hosts_of(setting, setting.drives)
    return [
        FleetJob(
            machine=replace(machine, scheme=scheme), hosts=hosts, trace=trace, hours=hours,
            rate=setting.rate if waiting == "no" else 1.0, seed=setting.seed, waiting=waiting,
        )
        for scheme in variants(machine).values()
        for waiting in WAITING
    ]  # fmt: skip


def compared(machine: FleetHost, results: Sequence[Served]) -> list[dict[str, Any]]:
    """Rows of the variants."""
    rows = list[dict[str, Any]]()
    for name, arriving, waiting in zip(variants(machine), results[::2], results[1::2], strict=True):
        rate = waiting.made.size * busy_rate(waiting)
        rows.append({
            "what": name,
            "ttft_s": _percentiles(arriving, TTFT),
            "tpot_s": _percentiles(arriving, TPOT),
            "reused_percent": 100 * arriving.reused_tokens / max(1, arriving.input_tokens),
            "copied_percent": 100 * arriving.copied_tokens / max(1, arriving.input_tokens),
            "capacity_tokens_per_s": rate,
            "capacity_ratio": rate / rows[0]["capacity_tokens_per_s"] if rows else 1.0,
        })  # fmt: skip
    return rows


def ends_of(rows: Sequence[dict[str, Any]]) -> tuple[int | None, str]:
    """The drives from which on twice as many give too little, and what takes most of the time of those."""
    for row, more in pairwise(rows):
        if more["tokens_per_s"] < LEAST_GAIN * row["tokens_per_s"]:
            return row["drives"], more["bound"]
    return None, f"does not end within {rows[-1]['drives']} drives: {rows[-1]['bound']}" if rows else ""


def experiment(setting: FleetOptions) -> Outcome:
    """Tokens/s, TTFT and TPOT of a fleet of computational drives under a trace, and where scaling ends."""
    trace = public_trace(setting.trace)
    machine = machine_of(setting, trace)
    fitted = machine.fitted
    machine.check_room(max(request.input_tokens + request.output_tokens for request in trace.requests))
    hosts, swept = hosts_of(setting, setting.drives), sizes(setting)
    served, *others = run_jobs(
        [
            FleetJob(
                machine=machine, hosts=hosts, trace=trace, hours=setting.hours, rate=setting.rate, seed=setting.seed
            ),
            *(size_job(setting, machine, trace, drives) for drives in swept),
            *variant_jobs(setting, machine, trace),
        ],
        setting.ray,
    )
    rows = [row_of(setting, drives, other) for drives, other in zip(swept, others, strict=False)]
    extrapolate(setting, machine, trace, rows)
    ends_at, why = ends_of(rows)
    result = figures(served, setting.hours * 3600) | {
        "drives": setting.drives,
        "hosts": hosts,
        "groups_of_a_host": machine.groups,
        "idle_drives": hosts * (machine.drives - machine.groups * machine.group),
        "ends_at": ends_at,
        "why": why,
        "extrapolated": (ends_at or rows[-1]["drives"]) >= MAX_DRIVES,
        "capacity_tokens_per_s": next((row["tokens_per_s"] for row in rows if row["drives"] == setting.drives), None),
        "sweep": rows,
        "variants": compared(machine, others[len(swept) :]),
        "swept": f"one host, {BACKLOG_REQUESTS} requests wait from the beginning, at most {SWEEP_HOURS:g} h; beyond "
        f"{MAX_DRIVES} drives is extrapolated; scaling ends where twice the drives give less than {LEAST_GAIN:g} times "
        "the tokens/s",
        "resampled": f"{trace.name}: {period_s(trace) / 3600:.2f} h once as it is, then as many of its "
        f"conversations drawn with repetition, as new content but for system prompts, seed {setting.seed}",
        "deviation_percent": fitted.deviation_percent,
        "worst_percent": fitted.worst_percent,
        "coefficients": asdict(fitted),
        "setting": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(setting).items()}
        | {"trace": trace.name},
    }
    return Outcome(result, _shown(result), _NOTES)


_NOTES = (
    "attention is dense on FP16 keys and values; the sizes of the sweep share no prefixes",
    "variants: latencies of the trace's first period; capacity with all of its requests waiting from the beginning",
    "deviations are of the drive's step alone, at the first requests of the trace that the coefficients name",
)


def _shown(result: dict[str, Any]) -> list[Any]:
    def ms(values: dict[str, float | None]) -> str:
        return ", ".join("-" if value is None else f"{1e3 * value:,.1f}" for value in values.values())

    flat = {
        key: result[key] for key in ("drives", "hosts", "requests", "ended", "tokens_per_s", "utilisation", "bound")
    }
    flat |= {"ttft p50, p99, ms": ms(result["ttft_s"]), "tpot p50, p99, ms": ms(result["tpot_s"])}
    deviations = ", ".join(f"{percent:.1f} at {drives}" for drives, percent in result["deviation_percent"].items())
    flat |= {"deviation from the emulator, %": deviations, "scaling ends at": result["ends_at"] or "-"}
    flat |= {"beyond 1,024 drives, extrapolated": result["extrapolated"], "why": result["why"]}
    cells = [
        (str(row["drives"]), str(row["hosts"]), f"{row['tokens_per_s']:,.0f}", row["bound"]) for row in result["sweep"]
    ]
    columns = ("drives", "hosts", "tokens/s", "bound")
    changed = [
        (
            row["what"], ms(row["ttft_s"]), ms(row["tpot_s"]), f"{row['reused_percent']:.0f}",
            f"{row['capacity_tokens_per_s']:,.0f}", f"{row['capacity_ratio']:.2f}",
        )
        for row in result["variants"]
    ]  # fmt: skip
    names = ("", "TTFT p50, p99, ms", "TPOT p50, p99, ms", "reused %", "capacity, tokens/s", "ratio")
    return [
        flat_table("A fleet (modelled)", flat),
        table("More drives, requests always wait", columns, cells),
        table("One change at a time", names, changed, left=("",)),
    ]
