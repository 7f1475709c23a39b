"""`vcsd drive show`, `log`, `format`, `copy`, `passthru`, `top`: administration of drives."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from csd_link.served_drive import DEFAULT
from csd_spec import LogPage
from vcsd.progress import status
from vcsd_cli.serve import find_created, running
from vcsd_cli.shared import Output, OutputOption, print_json, report_done, show, stdout

PAGE_HELP = """smart: health, data written, media errors; wear: write amplification, erases, bad blocks; latency:
simulated times of commands since power-on; error: the last failed commands; programs: attention methods of the drive;
prefixes: models whose prompt prefixes it stores"""


class Page(StrEnum):
    """Pages of `vcsd drive log`: the drive's own, and the manifests of prefixes."""

    SMART = "smart"
    WEAR = "wear"
    LATENCY = "latency"
    ERROR = "error"
    PROGRAMS = "programs"
    PREFIXES = "prefixes"


DriveArgument = Annotated[str, typer.Argument(help="name of a drive, or a folder (see vcsd run --data-dir)")]


def _created(name: str) -> Path:
    return find_created(name).parent


def _log(drive: str, page: LogPage) -> dict[str, Any]:
    from vcsd.administer import opened, read_log

    with opened(drive, _created) as device:
        return read_log(device, page)


def _prefixes(drive: str, tenant: str) -> dict[str, Any]:
    """Models whose prompt prefixes are stored in a drive, as their manifests."""
    from vcsd.administer import read_prefixes

    return {"models": read_prefixes(drive, _created, tenant)}


def _prefix_row(manifest: dict[str, Any]) -> dict[str, Any]:
    model = manifest.get("model", {})
    return {
        "model": model.get("name", "?"),
        "identity": model.get("digest", "?"),
        "files": len(model.get("files", [])),
        "blocks": manifest["blocks"],
        "tokens of a block": manifest.get("block_tokens", "?"),
    }


def log(
    drive: DriveArgument,
    page: Annotated[Page, typer.Argument(help=PAGE_HELP)] = Page.SMART,
    tenant: Annotated[str | None, typer.Option(help="tenant that owns the prefixes (default: default)")] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Print a log page of a served or created drive, or of a drive folder."""
    if tenant is not None and page is not Page.PREFIXES:
        raise ValueError(f"--tenant {tenant} has no effect on the {page} page: remove it")
    log = _prefixes(drive, tenant or DEFAULT) if page is Page.PREFIXES else _log(drive, LogPage[page.name])
    rows = {
        Page.LATENCY: lambda: [{"command": kind} | times for kind, times in log.items()],
        Page.ERROR: lambda: log["errors"],
        Page.PROGRAMS: lambda: log["programs"],
        Page.PREFIXES: lambda: [_prefix_row(manifest) for manifest in log["models"]],
    }.get(page)
    if rows:
        _rows(f"{page}, {drive}", rows(), log, output)
    else:
        show(f"{page}, {drive}", log, output)


def _rows(title: str, rows: list[dict[str, Any]], records: dict[str, Any], output: Output) -> None:
    """Print records with equal keys as a table."""
    if output is Output.JSON:
        print_json(records)
        return
    if not rows:
        stdout().print(f"{title}: none")
        return
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:,.0f}" if isinstance(value, float) else str(value) for value in row.values()))
    stdout().print(table)


def show_drive(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print Identify Controller data, and size and use of the block namespace (nvme-cli's key names)."""
    from vcsd.administer import identify_controller, opened, read_log

    with opened(drive, _created) as device:
        controller = identify_controller(device.spec, Path(drive).name)
        namespace = read_log(device, LogPage.NAMESPACE)
    if output is Output.JSON:
        print_json({"controller": controller, "namespace": namespace})
    else:
        show(f"controller, {drive}", controller, output)
        show(f"block namespace, {drive}", namespace, output)


def format_drive(
    drive: DriveArgument,
    yes: Annotated[bool, typer.Option("--yes", help="erase without confirmation")] = False,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Erase all sequences and blocks of an offline drive; wear and counters are kept."""
    from csd_firmware import InProcessDrive
    from vcsd.administer import folder_of

    folder = folder_of(drive, _created)
    with closing(InProcessDrive.reopen(folder)) as device:
        if not yes and not (sys.stdin.isatty() and typer.confirm(f"Erase all data of {folder}?", err=True)):
            raise ValueError(f"{folder} was not formatted: say --yes")
        freed, took_ns = device.format()
    show(f"format, {drive}", {"sequences_freed": freed, "simulated_ns": took_ns}, output)


def copy(
    drive: DriveArgument,
    folder: Annotated[Path, typer.Argument(help="new folder for the copy")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """Copy a drive's data and mapping, as of its last flush. The copy is a drive: a snapshot, or one restored."""
    from vcsd.administer import copy_drive, folder_of

    source = folder_of(drive, _created)
    with status(f"copying {source} to {folder}"):
        sequences = copy_drive(source, folder)
    report_done(f"{folder}: {sequences} sequences", {"folder": str(folder), "sequences": sequences}, output)


def passthru(
    drive: Annotated[str, typer.Argument(help="name of a served drive")],
    opcode: Annotated[str, typer.Option(help="command opcode, e.g. 0xca")],
    parameter: Annotated[list[str] | None, typer.Option("--cdw", "-p", help="next 32-bit parameter")] = None,
    input_file: Annotated[Path | None, typer.Option(help="payload to send")] = None,
    output_file: Annotated[Path | None, typer.Option(help="file for the returned data")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the entry without sending it")] = False,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Send a raw command to a served drive through its admin window (opcodes: docs/drives.md)."""
    from csd_link.connect import find_server
    from vcsd.administer import admin_window, describe_request, parse_request

    numbers = [_number("parameter", text) for text in parameter or []]
    request = parse_request(_number("opcode", opcode), numbers, input_file.read_bytes() if input_file else b"")
    if dry_run:
        show(f"dry run, {drive}", describe_request(request, 0), output)
        return
    if not find_server(drive):
        raise ValueError(f"no drive {drive} is served: vcsd drive serve {drive} first")
    device = admin_window(drive)
    done = device.request(request, 0).result()
    device.close()
    data = b"".join(array.tobytes() for array in done.data)
    if output_file:
        output_file.write_bytes(data)
    result = {
        "status": f"{done.status:#05x}",
        "status_name": done.status.name.lower(),
        "reason": done.reason,
        "simulated_ns": done.latency_ns,
        "data_bytes": len(data),
        "data_begins": data[:64].hex(" ", 4),
    }
    show(f"opcode {request.opcode:#04x}, {drive}", result, output)
    if done.status:
        sys.exit(1)


def _number(name: str, text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError(f"{name} = {text!r}: must be a number, such as 202 or 0xca") from None


def top(
    rounds: Annotated[
        int, typer.Option("--count", "-n", min=0, max=10**6, help="number of updates; 0: until interrupted")
    ] = 0,
    seconds: Annotated[float, typer.Option("--interval-s", min=0.1, max=3600, help="update interval, seconds")] = 1.0,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Show live statistics of served drives. Prints once if stdout is not a terminal."""
    from vcsd.administer import opened, read_log

    def look() -> dict[str, dict[str, Any]]:
        pages = {}
        for name in running():
            with opened(name, _created) as device:
                pages[name] = read_log(device, LogPage.SMART)
        return pages

    before = look()
    if not before:
        raise ValueError("no drive is served: start one with vcsd drive serve")
    if output is Output.JSON:
        print_json({"drives": before})
        return
    live = stdout().is_terminal
    with Live(_top_table(before, before, seconds), console=stdout(), auto_refresh=False) as view:
        turn = 0
        while (rounds or live) and turn != rounds:
            time.sleep(seconds)
            now = look()
            view.update(_top_table(before, now, seconds), refresh=live)
            before, turn = now, turn + 1


def _top_table(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]], seconds: float) -> Table:
    table = Table(title="Served drives", title_justify="left")
    table.add_column("drive")
    for column in ("sequences", "reads/s", "writes/s", "refused", "written, MB", "worn, %", "WAF"):
        table.add_column(column, justify="right")
    for name, smart in now.items():
        old = before.get(name, smart)
        rates = [(smart[key] - old[key]) / seconds for key in ("host_read_commands", "host_write_commands")]
        table.add_row(
            name,
            str(smart["sequences"]),
            *(f"{rate:,.0f}" for rate in rates),
            str(smart["num_err_log_entries"]),
            f"{smart['data_units_written'] * 0.512:,.1f}",
            str(smart["percent_used"]),
            f"{smart['waf']:.3f}",
        )
    return table
