"""`vcsd config`: description files of drives."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vcsd_cli.shared import Output, OutputOption, show

config = typer.Typer(help="Print and validate description files, and print their JSON schema.")


class DescriptionKind(StrEnum):
    """Kinds of description files."""

    DRIVE = "drive"
    DRIVES = "drives"


@config.command("show")
def config_show(
    preset: Annotated[str, typer.Argument(help="name of a preset; see docs/how-to/own-drive.md")] = "",
    schema: Annotated[
        DescriptionKind | None,
        typer.Option(help="instead the JSON schema of the file of one drive, or of drives to serve"),
    ] = None,
) -> None:
    """Print the description of a preset drive (default: the paper's) as YAML, to be changed and run."""
    from csd_spec import DriveSpec
    from csd_spec.checked import adapter
    from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH
    from nvmevirt_config import SHIPPED
    from nvmevirt_config.serve_config import ServeFile

    if schema and preset:
        raise ValueError(f"--schema {schema}: a schema has no preset: remove {preset}")
    if schema:
        kind = DriveSpec if schema is DescriptionKind.DRIVE else ServeFile
        print(json.dumps(adapter(kind).json_schema(), indent=1))
        return
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
