"""`vcsd fsck`: check the folder of a drive, and mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vcsd_cli.shared import Output, OutputOption, print_json, stdout

MENDED, LOST = 1, 4  # exit codes, as e2fsck has them


def fsck(
    drive: Annotated[str, typer.Argument(help="name of a drive, or a folder (see vcsd run --keep)")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is wrong and change nothing")] = False,
    drive_file: Annotated[
        Path | None, typer.Option("--drive", help="YAML description, should the drive's own be lost")
    ] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Check a drive that is not served, and mend what can be; what is changed is kept beside it.

    The exit code is 0 where nothing was wrong, 1 where all of it could be mended, 4 where data is lost.
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
        for column in ("where", "what", "what became of it"):
            table.add_column(column)
        for finding in report.findings:
            table.add_row(*finding.values())
        stdout().print(table)
        if report.kept:
            stdout().print(f"what was there before: {report.kept}")
    else:
        stdout().print(f"{folder}: clean")
    raise typer.Exit(LOST if report.lost else MENDED if report.findings else 0)
