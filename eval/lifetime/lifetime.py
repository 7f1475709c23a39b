"""`vcsd eval lifetime`: wear, energy and money of engines' and our writes, through the FTL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any

import typer

from csd_spec import DriveSpec
from csd_spec.presets import INSTCSD_OVERLAPPED
from ftl.errors import OutOfSpaceError
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, progress
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.lifetime.drive import WARM, YEAR_DAYS, DriveCounts, DriveTraffic, counted_days, dwpd, scaled, years
from vcsd_eval.lifetime.energy import BOUNDS, PROGRESSIVE, Prices, ReplayWork, constants, decoded_bytes, dollars, joules
from vcsd_eval.lifetime.engines import EngineReplay
from vcsd_eval.lifetime.ours import OurReplay
from vcsd_eval.lifetime.patterns import FILL, PATTERNS
from vcsd_eval.lifetime.workload import Day, make_day
from vcsd_eval.options import numbers
from vcsd_eval.papers.profiles import Model
from vcsd_eval.public_trace import TracePath, public_trace
from vcsd_eval.sweep import cores, sweep

LAYOUTS = ("plain", "fp16", "int4", PROGRESSIVE)
OURS = "ours"


@dataclass(frozen=True, slots=True)
class LifetimeOptions:
    """Options of the replay."""

    trace: TracePath = None
    hours: Annotated[float, typer.Option(min=0.01, max=8784, help="length of the replay")] = 24.0
    drives: Annotated[int, typer.Option(min=1, max=1024, help="drives that share the traffic")] = 8
    model: Annotated[str, typer.Option(help="model profile: a name or a YAML file")] = "llama-3-8b"
    over_provisioning: Annotated[str, typer.Option(help="percent, with commas; all patterns have the first one")] = (
        "28,12"
    )
    streams: Annotated[int, typer.Option(min=1, max=64, help="placement handles (FDP) of the rows that use them")] = 8
    scale: Annotated[int, typer.Option(min=1, max=4096, help="traffic and blocks of a plane are 1/N")] = 512
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the draws from the trace")] = 0


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One row. name: engine, or `ours`. layout: in-drive layout of `ours`, else ""."""

    name: str
    layout: str
    percent: float
    handles: int = 0
    discard: bool = False

    @property
    def placement(self) -> str:
        """Hints that the drive gets: placement of data, and deletions."""
        if self.layout:
            return "sequences"
        return f"{self.handles} handles" if self.handles else "discard" if self.discard else "-"


def runs(percents: Sequence[float], handles: int) -> list[ReplayRun]:
    """All rows; those that take longest first."""
    first, *others = percents
    replays = [ReplayRun(OURS, layout, first) for layout in LAYOUTS]
    replays += [ReplayRun(OURS, PROGRESSIVE, other) for other in others]
    for pattern in PATTERNS:
        replays += [ReplayRun(pattern.name, "", percent) for percent in percents]
        replays += [ReplayRun(pattern.name, "", first, handles), ReplayRun(pattern.name, "", first, discard=True)]
    return replays


@cache
def _day(setting: LifetimeOptions) -> Day:
    return make_day(public_trace(setting.trace), setting.hours, 1 / setting.scale, setting.seed)


def load_of(setting: LifetimeOptions, percent: float, spec: DriveSpec = INSTCSD_OVERLAPPED) -> DriveTraffic:
    """Traffic of one drive; raises ValueError for a model whose heads the drives cannot share."""
    shape = Model.load(setting.model).shape
    if shape.latent or shape.kv_heads % setting.drives:
        raise ValueError(f"model {setting.model}: {shape.kv_heads} KV heads: choose --drives that divide them")
    return DriveTraffic(
        scaled(spec, setting.scale), shape, setting.drives, _day(setting), setting.hours, setting.scale, percent
    )


def replay(item: tuple[ReplayRun, LifetimeOptions], tick: Tick) -> DriveCounts:
    """One row's counts; raises ValueError if the drive has no room for the pattern."""
    run, setting = item
    load = load_of(setting, run.percent)
    try:
        if run.layout:
            return OurReplay(run.layout, load).run(tick)
        pattern = next(candidate for candidate in PATTERNS if candidate.name == run.name)
        return EngineReplay(pattern, load, run.handles, run.discard).run(tick)
    except OutOfSpaceError as error:
        raise ValueError(
            f"{run.name} {run.layout or run.placement}, over-provisioning = {run.percent:g}: no room ({error}): "
            "take more --over-provisioning, fewer --streams, or a smaller --scale"
        ) from error


def row_of(run: ReplayRun, counts: DriveCounts, setting: LifetimeOptions, prices: Prices) -> dict[str, Any]:
    """A row's figures."""
    load, model, cycles = load_of(setting, run.percent), Model.load(setting.model), constants().constants["pe_cycles"]
    least, mean, most = counts.block_erases
    written = counts.programmed_pages * load.spec.geometry.page_bytes * setting.drives
    work = ReplayWork("in drives" if run.layout else "engine", run.layout, counts, model, load.spec, setting.drives)
    return {
        "engine": run.name,
        "layout": run.layout or "-",
        "over_provisioning": run.percent,
        "placement": run.placement,
        "waf": counts.waf,
        "dwpd": dwpd(counts, load),
        "years": years(counts, load, cycles.value),
        "years_low": years(counts, load, cycles.low),
        "years_high": years(counts, load, cycles.high),
        "years_of_most_worn_block": years(counts, load, cycles.value) * mean / max(1, most),
        "erases": {"least": least, "mean": mean, "most": most},
        "p50_read_us": counts.wait_us(50),
        "p99_read_us": counts.wait_us(99),
        "reused_percent": 100 * counts.tally.reused_tokens / counts.tally.input_tokens,
        "bytes_per_reused_token": written / counts.tally.reused_tokens if counts.tally.reused_tokens else None,
        "attending_drives": attending_drives(work, load) if run.layout else None,
    } | energy_of(work, load, prices)


def attending_drives(work: ReplayWork, load: DriveTraffic) -> float:
    """Drives whose channels deliver what all output tokens of the traffic attend to."""
    rate = decoded_bytes(work, constants().at("value")) * load.scale / (counted_days(load) * 86400)
    return rate / load.spec.flash_bytes_per_s


def energy_of(work: ReplayWork, load: DriveTraffic, prices: Prices) -> dict[str, Any]:
    """Energy and money of a million output tokens."""
    energy = joules(work)
    lives = years(work.counts, load, constants().constants["pe_cycles"].value)
    tokens = load.scale * work.counts.tally.output_tokens / counted_days(load) * YEAR_DAYS
    capacity = load.scale * FILL * load.logical_pages * load.spec.geometry.page_bytes * load.drives
    return {
        "joules_per_million_tokens": {bound: energy[bound]["total"] for bound in BOUNDS},
        "joules_by_unit": {bound: {k: v for k, v in energy[bound].items() if k != "total"} for bound in BOUNDS},
        "dollars_per_million_tokens": dollars(work, prices, lives, tokens, capacity),
    }


def offloaded(run: ReplayRun, counts: DriveCounts, setting: LifetimeOptions, prices: Prices) -> list[dict[str, Any]]:
    """Dense offload to plain SSDs, and the cache in host memory, with the hits and the flash writes of an engine."""
    load, model = load_of(setting, run.percent), Model.load(setting.model)
    return [
        {"kind": kind, "hits_of": run.name}
        | energy_of(ReplayWork(kind, "", counts, model, load.spec, setting.drives), load, prices)
        for kind in ("plain SSD", "host memory")
    ]


def headline(rows: Sequence[dict[str, Any]], percent: float) -> dict[str, Any]:
    """Bytes programmed for each reused token: ours, the best and the worst engine, at one over-provisioning."""
    same = [row for row in rows if row["over_provisioning"] == percent]
    engines = {f"{r['engine']}, {r['placement']}": r["bytes_per_reused_token"] for r in same if r["engine"] != OURS}
    best, worst = min(engines, key=engines.__getitem__), max(engines, key=engines.__getitem__)
    ours = {r["layout"]: r["bytes_per_reused_token"] for r in same if r["engine"] == OURS}
    return {
        "over_provisioning": percent,
        "best_engine": best,
        "worst_engine": worst,
        "worst_over_ours": {layout: engines[worst] / bytes_per_token for layout, bytes_per_token in ours.items()},
        "ours_over_best": {layout: bytes_per_token / engines[best] for layout, bytes_per_token in ours.items()},
    }


def experiment(setting: LifetimeOptions, prices: Prices) -> Outcome:
    """Wear, read latency, energy and dollars of writes of engines and in-drive layouts, replayed through the FTL."""
    percents = numbers("over-provisioning", setting.over_provisioning, float)
    chosen = runs(percents, setting.streams)
    visits = len(load_of(setting, percents[0]).day.visits)
    with progress("requests", visits * len(chosen)) as tick:
        counted = sweep(replay, [(run, setting) for run in chosen], cores(), tick)
    rows = [row_of(run, counts, setting, prices) for run, counts in zip(chosen, counted, strict=True)]
    base = next(at for at, run in enumerate(chosen) if run.name == PATTERNS[0].name)
    others = offloaded(chosen[base], counted[base], setting, prices)
    reuse = all(row["bytes_per_reused_token"] for row in rows)
    headlines = [headline(rows, percent) for percent in percents] if reuse else []
    scale = load_of(setting, percents[0])
    result = {
        "setting": asdict(setting) | {"trace": public_trace(setting.trace).name},
        "simulated": {
            "requests": visits,
            "drive_bytes": scale.spec.geometry.capacity_bytes,
            "scale": setting.scale,
            "warm_hours": WARM * setting.hours,
            "says": "one of the drives, which are alike; 1/scale of its blocks and of the trace's conversations, drawn "
            "with repetition for each of the trace's durations, each as new content but for system prompts",
        },
        "rows": rows,
        "offload": others,
        "headline": headlines,
        "prices": asdict(prices),
        "constants": {name: asdict(constant) for name, constant in constants().constants.items()},
        "patterns": [asdict(pattern) for pattern in PATTERNS],
    }
    drives = ", ".join(
        f"{row['layout']} {row['attending_drives']:,.0f}"
        for row in rows
        if row["engine"] == OURS and row["over_provisioning"] == percents[0]
    )
    more = f"drives whose channels deliver what decoding at this rate reads, of {setting.drives} here: {drives}"
    return Outcome(result, [*_shown(rows, others), *map(line_of, headlines)], notes=(*_NOTES, more))


_NOTES = (
    "ours is compared at unequal error: plain, fp16 and int4 keep all bits of K and V, progressive 8 of 16",
    "ours writes answers too, since decoding attends to them in the drives; engines write prompts alone",
    "read latencies: a request's writes are issued at once when it arrives; those of fp16, int4 and progressive are "
    "upper bounds, since the model keeps lanes idle before a program that waits for rows of its group",
    "energy has neither idle power nor fans; every constant is in -o json with its source and range",
)


def line_of(row: dict[str, Any]) -> str:
    """The headline in one line."""
    layouts = ", ".join(
        f"{layout} {row['worst_over_ours'][layout]:.2f}x fewer than the worst, {over:.2f}x the best"
        for layout, over in row["ours_over_best"].items()
    )
    return (
        f"Bytes programmed for each reused token at {row['over_provisioning']:g} % over-provisioning, ours compared "
        f"with engines (worst {row['worst_engine']}; best {row['best_engine']}): {layouts}"
    )


def _shown(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[Any]:
    wear = [
        (
            row["engine"], row["layout"], f"{row['over_provisioning']:g}", row["placement"], f"{row['waf']:.3f}",
            f"{row['dwpd']:.1f}", f"{row['years']:.2f} ({row['years_low']:.2f} to {row['years_high']:.2f})",
            "{least} / {mean:.1f} / {most}".format(**row["erases"]), _time(row["p50_read_us"]),
            _time(row["p99_read_us"]), f"{row['reused_percent']:.1f}", _kb(row["bytes_per_reused_token"]),
        )
        for row in rows
    ]  # fmt: skip
    columns = (
        "engine", "layout", "OP %", "placement", "WAF", "DWPD", "years", "erases: least / mean / most",
        "read p50, ms", "p99", "reused %", "kB a reused token",
    )  # fmt: skip
    shown = {f"{row['engine']} {row['layout']}": row for row in reversed(rows)} | {
        other["kind"]: other for other in others
    }
    cells = [(name, *_energy(row)) for name, row in shown.items()]
    names = ("", *(f"{bound}, kJ" for bound in BOUNDS), "largest unit", "$")
    text = ("engine", "layout", "placement")
    return [
        table("Wear of a drive (simulated)", columns, wear, left=text),
        table("A million output tokens (modelled)", names, cells, left=("", "largest unit")),
    ]


def _energy(row: dict[str, Any]) -> tuple[str, ...]:
    totals, middle = row["joules_per_million_tokens"], row["joules_by_unit"]["value"]
    largest = max(middle, key=middle.__getitem__)
    share = 100 * middle[largest] / sum(middle.values())
    figures = [f"{totals[bound] / 1e3:,.0f}" for bound in BOUNDS]
    return (*figures, f"{largest}, {share:.0f} %", f"{row['dollars_per_million_tokens']:.2f}")


def _time(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:,.2f}"


def _kb(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e3:,.0f}"
