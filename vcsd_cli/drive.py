"""Administration of drives: identification, logs, format, snapshots, raw commands."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from csd_spec import LogPage
from vcsd.progress import status
from vcsd_cli.guest import as_dict, findings_table
from vcsd_cli.serve import find_created, running
from vcsd_cli.shared import Output, OutputOption, print_json, report_done, show, stdout

log = typer.Typer(help="Print log pages of a served or created drive, or of a drive folder.")
config = typer.Typer(help="Print and validate description files, and print their JSON schema.")

DriveArgument = Annotated[str, typer.Argument(help="name of a drive, or a folder (see vcsd run --data-dir)")]


def _created(name: str) -> Path:
    return find_created(name).parent


def _log(drive: str, page: LogPage) -> dict[str, Any]:
    from vcsd.administer import opened, read_log

    with opened(drive, _created) as device:
        return read_log(device, page)


@log.command("smart")
def log_smart(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print health: wear, spare blocks, data written, media errors."""
    show(f"SMART, {drive}", _log(drive, LogPage.SMART), output)


@log.command("wear")
def log_wear(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print write amplification, erase histogram and bad blocks."""
    show(f"wear, {drive}", _log(drive, LogPage.WEAR), output)


@log.command("latency")
def log_latency(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print simulated times of commands since power-on."""
    page = _log(drive, LogPage.LATENCY)
    _rows(f"latency, {drive}", [{"command": kind} | times for kind, times in page.items()], page, output)


@log.command("error")
def log_error(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print the last failed commands since power-on."""
    page = _log(drive, LogPage.ERROR)
    _rows(f"errors, {drive}", page["errors"], page, output)


@log.command("programs")
def log_programs(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print device-defined programs: the attention methods of the drive."""
    page = _log(drive, LogPage.PROGRAMS)
    _rows(f"programs, {drive}", page["programs"], page, output)


def prefixes(
    drive: DriveArgument,
    tenant: Annotated[str, typer.Option(help="tenant that owns the prefixes")] = "default",
    output: OutputOption = Output.NORMAL,
) -> None:
    """List the models whose prompt prefixes are stored in a drive (docs/prefixes.md)."""
    from vcsd.administer import read_prefixes

    manifests = read_prefixes(drive, _created, tenant)
    rows = [
        {
            "model": (model := manifest.get("model", {})).get("name", "?"),
            "identity": model.get("digest", "?"),
            "files": len(model.get("files", [])),
            "blocks": manifest["blocks"],
            "tokens of a block": manifest.get("block_tokens", "?"),
        }
        for manifest in manifests
    ]
    _rows(f"prefixes, {drive}", rows, {"models": manifests}, output)


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


def id_ctrl(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print Identify Controller data (nvme-cli key names)."""
    from vcsd.administer import identify_controller, opened

    with opened(drive, _created) as device:
        show(f"controller, {drive}", identify_controller(device.spec, Path(drive).name), output)


def id_ns(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Print size and utilization of the block namespace, in logical blocks."""
    show(f"namespace, {drive}", _log(drive, LogPage.NAMESPACE), output)


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


def snapshot(
    drive: DriveArgument,
    folder: Annotated[Path, typer.Argument(help="new folder for the snapshot")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """Copy a drive's data and mapping, as of its last flush."""
    from vcsd.administer import folder_of

    _copy_drive(folder_of(drive, _created), folder, output)


def restore(
    snapshot: Annotated[Path, typer.Argument(help="folder of a snapshot")],
    drive: Annotated[Path, typer.Argument(help="new folder for the drive")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """Create a drive from a snapshot."""
    _copy_drive(snapshot, drive, output)


def _copy_drive(source: Path, target: Path, output: Output) -> None:
    from vcsd.administer import copy_drive

    with status(f"copying {source} to {target}"):
        sequences = copy_drive(source, target)
    report_done(f"{target}: {sequences} sequences", {"folder": str(target), "sequences": sequences}, output)


def io_passthru(
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
        raise ValueError(f"no drive {drive} is served: vcsd serve {drive} first")
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
        raise ValueError("no drive is served: start one with vcsd serve")
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


def doctor(output: OutputOption = Output.NORMAL) -> None:
    """Check the requirements of each transport, and print fixes for missing ones. Exit code 1: one is not ready."""
    from vcsd.doctor import examine

    findings = examine()
    if output is Output.JSON:
        print_json({"ways": [as_dict(finding) for finding in findings]})
    else:
        stdout().print(findings_table("Transports", findings))
    if not all(finding.ok for finding in findings):
        sys.exit(1)


@config.command("show")
def config_show(
    preset: Annotated[str, typer.Argument(help="name of a preset; see docs/how-to/own-drive.md")] = "",
) -> None:
    """Print the description of a preset drive (default: the paper's) as YAML, to be changed and run."""
    from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH
    from nvmevirt_config import SHIPPED

    if preset and preset not in DRIVES:
        raise ValueError(f"{preset}: no such preset, there are {', '.join(DRIVES)}")
    print((SHIPPED / f"{preset or INSTCSD_ZYNQ7045_8CH.name}.yaml").read_text(encoding="utf-8"), end="")


@config.command("validate")
def config_validate(
    file: Annotated[Path, typer.Argument(help="description of a drive, or list of drives to serve")],
    output: OutputOption = Output.NORMAL,
) -> None:
    """Validate a description file and print a summary."""
    from nvmevirt_config import load_config, load_drive
    from nvmevirt_config.document import read_yaml
    from nvmevirt_config.serve_config import check_files

    if "drives" in read_yaml(file, dict[str, Any]):
        served = load_config(file).drives
        check_files(served)
        drives = {drive.name: drive.spec for drive in served}
    else:
        spec = load_drive(file)
        drives = {spec.name: spec}
    summary = {name: f"{spec.name}, {spec.geometry.capacity_bytes / 1e9:,.1f} GB" for name, spec in drives.items()}
    show(f"{file} is valid", {"valid": True} | summary, output)


class DescriptionKind(StrEnum):
    """Kinds of description files."""

    DRIVE = "drive"
    DRIVES = "drives"


@config.command("schema")
def config_schema(what: Annotated[DescriptionKind, typer.Argument(help="one drive, or drives to serve")]) -> None:
    """Print the JSON schema of a description file."""
    from csd_spec import DriveSpec
    from csd_spec.checked import adapter
    from nvmevirt_config.serve_config import ServeFile

    print(json.dumps(adapter(DriveSpec if what is DescriptionKind.DRIVE else ServeFile).json_schema(), indent=1))
