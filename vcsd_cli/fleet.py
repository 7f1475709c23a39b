"""`vcsd fleet`: drives on many machines, placed and restarted by Ray."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from csd_link.fleet_table import (
    MAX_DRIVES,
    ClusterAddress,
    FleetPlan,
    FleetTable,
    find_cluster,
    mark_draining,
    read_local,
    read_table,
)
from csd_link.host_end import DriveLostError
from csd_spec.optional import require
from vcsd_cli.shared import Output, OutputOption, err, print_json, stdout

fleet = typer.Typer(help="Run drives on the nodes of a Ray cluster, or on this machine, with data over NVMe/TCP.")

AddressOption = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="GCS of the Ray cluster (default: local fleet, RAY_ADDRESS, auto)")
]


def _cluster(address: str) -> ClusterAddress:
    return find_cluster(address.removeprefix("ray:"))


def _table(cluster: ClusterAddress) -> FleetTable:
    """The fleet's table; raises ValueError if no fleet is up."""
    if (table := read_table(cluster)) is None:
        raise ValueError("no fleet is up: vcsd fleet up starts one")
    return table


@fleet.command()
def up(
    file: Annotated[Path | None, typer.Argument(metavar="[FLEET.yaml]", help="description of the fleet")] = None,
    local: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_DRIVES, help="number of drives to run on this machine, without a cluster"),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(min=0, max=MAX_DRIVES, help="spare drives (default: as in FILE)")
    ] = None,
    address: AddressOption = "",
) -> None:
    """Start a fleet; returns when every drive answers."""
    from fleet.cluster import start
    from fleet.local import start_local, stop_local
    from nvmevirt_config.fleet_config import load_fleet
    from vcsd.progress import progress, status
    from vcsd.transport import FACTORY

    if file is None and local is None:
        raise ValueError("name a FLEET.yaml, or --local N for drives on this machine")
    if local is not None and address:
        raise ValueError("--local and --address exclude each other")
    plan = load_fleet(file) if file else FleetPlan(drives=local or 1)
    plan = replace(plan, drives=local or plan.drives, spares=plan.spares if spares is None else spares)
    cluster, name = ClusterAddress(""), ""
    if local is None:
        cluster = _cluster(address or plan.address)
    else:
        with status("starting Ray on this machine"):
            cluster, name = start_local(plan.cpus * len(plan.names), plan.flash)
    began = time.monotonic()
    try:
        with progress("starting drives", len(plan.names)) as tick:
            start(cluster, plan, FACTORY.server[1:], tick, name)
    except BaseException:
        if local is not None:
            stop_local()
        raise
    err.print(
        f"{len(plan.names)} drives are up after {time.monotonic() - began:.0f} s: vcsd run --drives ray uses them"
    )


@fleet.command()
def status(
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="serve Prometheus metrics there until interrupted")
    ] = None,
    address: AddressOption = "",
    output: OutputOption = Output.NORMAL,
) -> None:
    """Show the drives of the fleet: state, node, address, restarts."""
    if metrics is not None:
        _serve_metrics(metrics, address)
    table = _table(_cluster(address))
    now = time.time()
    rows = [
        asdict(member) | {"uptime_s": round(now - member.since_s) if member.since_s else 0} for member in table.members
    ]
    if output is Output.JSON:
        print_json({"fleet": table.fleet, "drives": rows})
        return
    shown = Table(title=f"Fleet {table.fleet}", title_justify="left")
    for column in ("drive", "state", "node", "address", "generation", "restarts", "up for, s"):
        shown.add_column(column)
    for row in rows:
        state = f"{row['state']}: {row['reason']}" if row["reason"] else str(row["state"])
        where = f"{row['host']}:{row['port']}" if row["port"] else "-"
        figures = [str(row[name]) for name in ("generation", "restarts", "uptime_s")]
        shown.add_row(str(row["name"]), state, str(row["node"])[:8] or "-", where, *figures)
    stdout().print(shown)


@fleet.command()
def drain(drive: Annotated[str, typer.Argument(help="name of the drive")], address: AddressOption = "") -> None:
    """Mark a drive as draining: new hosts do not use it, hosts with redundancy move to another drive."""
    cluster = _cluster(address)
    member = _table(cluster).find(drive)
    mark_draining(cluster, member)
    err.print(f"{member.name}: draining")


@fleet.command()
def down(address: AddressOption = "") -> None:
    """Stop the fleet: its drives, their flash and, for a local fleet, its Ray."""
    from fleet.cluster import end
    from fleet.local import stop_local
    from vcsd.progress import status as showing

    is_local = not address and read_local() is not None
    with showing("stopping drives"):
        try:
            cluster = _cluster(address)
            _table(cluster)  # a clear error if no fleet is up, before Ray is imported
            end(cluster)
        except (DriveLostError, ConnectionError, ValueError):
            if not is_local:
                raise
        if is_local:
            stop_local()
    err.print("the fleet is down")


def _serve_metrics(at: str, address: str) -> NoReturn:
    """Serve metrics of the fleet until interrupted: drives by state, restarts, generations."""
    require("--metrics", "metrics", "prometheus_client")
    from vcsd.drive_metrics import FleetCollector, serve_metrics

    _table(_cluster(address))
    serve_metrics(at, FleetCollector(lambda: read_table(_cluster(address))))
    err.print(f"http://{at}/metrics")
    while True:
        time.sleep(3600)
