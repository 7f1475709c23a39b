"""Drives that were kept in a folder: log pages, snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcsd.commands.shared import Output, OutputOption, err, show

log = typer.Typer(help="Log pages of a drive that was kept in a folder.")

DriveArgument = Annotated[Path, typer.Argument(help="folder of the drive (see vcsd run --keep)")]


@log.command("smart")
def log_smart(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Health: wear, spare blocks, data written, media errors."""
    from csd_firmware import InProcessDevice
    from csd_firmware.logs import smart

    show(f"SMART, {drive}", smart(InProcessDevice.reopen(drive, private=True).firmware.ftl), output)


@log.command("wear")
def log_wear(drive: DriveArgument, output: OutputOption = Output.NORMAL) -> None:
    """Write amplification, erase histogram, bad blocks."""
    from csd_firmware import InProcessDevice
    from csd_firmware.logs import wear

    show(f"wear, {drive}", wear(InProcessDevice.reopen(drive, private=True).firmware.ftl), output)


def snapshot(drive: DriveArgument, folder: Annotated[Path, typer.Argument(help="new folder for the snapshot")]) -> None:
    """Copy a drive's data and map, as its last flush left them."""
    _copy_drive(drive, folder)


def restore(
    snapshot: Annotated[Path, typer.Argument(help="folder of a snapshot")],
    drive: Annotated[Path, typer.Argument(help="new folder for the drive")],
) -> None:
    """Make a drive in the state of a snapshot, which stays as it is."""
    _copy_drive(snapshot, drive)


def _copy_drive(source: Path, target: Path) -> None:
    from csd_firmware import InProcessDevice

    with err.status(f"copying {source} to {target}"):
        device = InProcessDevice.reopen(source, private=True)
        device.snapshot(target)
    err.print(f"{target}: {len(device.firmware.ftl.sequences)} sequences")
