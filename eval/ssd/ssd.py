"""`vcsd eval ssd`: public SSDs in the model, from published constants about their hardware, and published figures."""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

import typer

from csd_spec.presets import NVMEVIRT_970PRO
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.baselines.conventional import ConventionalSsd
from vcsd_eval.experiment import Outcome
from vcsd_eval.ssd.model import simulate
from vcsd_eval.ssd.profile import PublishedFigure, SsdProfile, drives, shared, with_sources
from vcsd_eval.ssd.workload import WORKLOADS

NVMEVIRT = {1: 15_803, 16: 195_959, 32: 283_532, 256: 379_975}  # depth: IOPS of NVMeVirt, 4 KiB random reads of 32 GiB
NVMEVIRT_SOURCE = "NVMeVirt, commit 61c90f7, SAMSUNG_970PRO: the times that its code gives for the same requests"
Pair = tuple[SsdProfile, PublishedFigure]


def pairs(drive: str | None, workload: str | None) -> list[Pair]:
    """Published figures of one drive or all, and of one workload or all."""
    profiles = drives() | drives("simulators")
    if drive is not None and drive not in profiles:
        raise ValueError(f"drive = {drive!r}: must be one of {', '.join(profiles)}")
    if workload is not None and workload not in WORKLOADS:
        raise ValueError(f"workload = {workload!r}: must be one of {', '.join(WORKLOADS)}")
    chosen = [profiles[drive]] if drive else list(profiles.values())
    selected = [
        (profile, figure) for profile in chosen for figure in profile.published if workload in (None, figure.workload)
    ]
    if not selected:
        has = ", ".join(sorted({figure.workload for profile in chosen for figure in profile.published}))
        raise ValueError(f"workload = {workload!r}: {drive} has no figure of it: choose one of {has}")
    return selected


def row_of(drive: SsdProfile, figure: PublishedFigure) -> dict[str, Any]:
    """A figure, the model's value, and the error over the published one."""
    ours = simulate(drive, figure)
    return {
        "drive": drive.name,
        "class": drive.market,
        "workload": figure.workload,
        "depth": figure.depth,
        "published": figure.value,
        "ours": ours,
        "unit": figure.unit,
        "error_percent": None if figure.value is None else 100 * (ours / figure.value - 1),
        "source": drive.sources[figure.source],
    }


def nvmevirt_rows(tick: Tick = no_tick) -> list[dict[str, Any]]:
    """Random reads on the preset `nvmevirt-970pro`, with NVMeVirt's own IOPS."""
    rows = []
    for depth, published in NVMEVIRT.items():
        end_ns, latencies = ConventionalSsd(NVMEVIRT_970PRO).closed_loop(depth, 300_000, 4096, 100)
        ours = latencies.size / (end_ns / 1e9)
        error = 100 * (ours / published - 1)
        rows.append({"depth": depth, "published": published, "ours": ours, "unit": "IOPS", "error_percent": error})
        tick(depth)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst error of rows that have a published figure; None without any."""
    rated = [row for row in rows if row["published"] is not None]
    if not rated:
        return {"median_error_percent": None, "worst_error_percent": None, "worst_row": None}
    worst = max(rated, key=lambda row: abs(row["error_percent"]))
    return {
        "median_error_percent": median(abs(row["error_percent"]) for row in rated),
        "worst_error_percent": worst["error_percent"],
        "worst_row": worst,
    }


def grouped(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """Rows, median and worst error by drive, by class or by workload."""
    names = dict.fromkeys(row[key] for row in rows)
    parts = {name: [row for row in rows if row[key] == name] for name in names}
    groups = {name: {"rows": len(part), **summary(part)} for name, part in parts.items()}
    for group in groups.values():
        worst = group["worst_row"]
        group["worst_row"] = f"{worst['drive']}, {worst['workload']}, depth {worst['depth']}"
    return groups


def line_of(rows: list[dict[str, Any]], total: dict[str, Any]) -> str:
    """Median and worst in one line."""
    worst = total["worst_row"]
    if not worst:
        return "No published figure: configurations of simulators only"
    where = f"{worst['drive']}, {worst['workload']}, depth {worst['depth']}"
    medians = [f"{name} {group['median_error_percent']:.1f} %" for name, group in grouped(rows, "class").items()]
    return (
        f"{len(rows)} rows of {len({row['drive'] for row in rows})} drives, nothing fitted: median error "
        f"{total['median_error_percent']:.1f} % ({', '.join(medians)}), worst {worst['error_percent']:+.1f} % ({where})"
    )


def experiment(
    drive: Annotated[str | None, typer.Option(help="name of the drive (default: all)")] = None,
    workload: Annotated[str | None, typer.Option(help=f"workload: {', '.join(WORKLOADS)} (default: all)")] = None,
) -> Outcome:
    """Public SSDs, simulated from constants of their hardware, and their published figures."""
    chosen = pairs(drive, workload)
    rows = []
    with progress("figures", len(chosen) + len(NVMEVIRT)) as tick:
        for profile, figure in chosen:
            rows.append(row_of(profile, figure))
            tick(figure)
        nvmevirt = nvmevirt_rows(tick)
    compared = [row for row in rows if row["published"] is not None]
    total = summary(compared)
    names = {profile.name: profile for profile, _ in chosen}
    result = {
        "drives": [{"name": name, "constants": with_sources(profile)} for name, profile in names.items()],
        "shared": with_sources(shared()),
        "rows": compared,
        **total,
        "fitted": 0,
        "by_class": grouped(compared, "class"),
        "by_drive": grouped(compared, "drive"),
        "by_workload": grouped(compared, "workload"),
        "nvmevirt": nvmevirt,
        "nvmevirt_source": NVMEVIRT_SOURCE,
        "simulators": [row for row in rows if row["published"] is None],
    }
    shown = [_shown(row["drive"], row["workload"], row) for row in rows]
    shown += [_shown(NVMEVIRT_970PRO.name, "random_read", row) for row in nvmevirt]
    columns = ("drive", "workload", "depth", "published", "ours", "unit", "error %")
    title = "SSDs in the model of a conventional SSD (simulated), and published figures"
    return Outcome(result, [table(title, columns, shown, left=("drive", "workload", "unit")), line_of(compared, total)])


def _shown(drive: str, workload: str, row: dict[str, Any]) -> tuple[str, ...]:
    published, error = row["published"], row["error_percent"]
    value = "-" if published is None else f"{published:,.0f}"
    percent = "-" if error is None else f"{error:+.1f}"
    return drive, workload, str(row["depth"]), value, f"{row['ours']:,.0f}", row["unit"], percent
