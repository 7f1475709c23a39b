"""`vcsd drive fsck`: checks and repairs the folder of a drive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vcsd_cli.shared import Output, OutputOption, print_json, stdout

REPAIRED, LOST = 1, 4  # exit codes, as of e2fsck


def fsck(
    drive: Annotated[str, typer.Argument(help="name of a drive, or a folder (see vcsd run --data-dir)")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="report errors without changing anything")] = False,
    drive_file: Annotated[
        Path | None, typer.Option("--drive-config", help="YAML description, if the drive's own is unreadable")
    ] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Check an offline drive and repair it. Overwritten bytes are saved in `fsck-N/` in its folder.

    Exit code: 0 = no errors, 1 = all errors repaired, 4 = data was lost.
    """
    from csd_firmware.fsck import fsck as check
    from nvmevirt_config import load_drive
    from vcsd.administer import folder_of
    from vcsd.progress import status
    from vcsd_cli.serve import find_created

    folder = folder_of(drive, lambda name: find_created(name).parent)
    with status("checking"):
        report = check(folder, dry_run, load_drive(drive_file) if drive_file else None)
    if output is Output.JSON:
        print_json({"folder": str(folder), "dry_run": dry_run} | report.to_dict())
    elif report.findings:
        table = Table(title=f"fsck, {folder}", title_justify="left")
        for column in ("where", "what", "result"):
            table.add_column(column)
        for finding in report.findings:
            table.add_row(*finding.values())
        stdout().print(table)
        if report.kept:
            stdout().print(f"overwritten bytes are saved in {report.kept}")
    else:
        stdout().print(f"{folder}: clean")
    raise typer.Exit(LOST if report.lost else REPAIRED if report.findings else 0)
