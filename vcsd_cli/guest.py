"""`vcsd guest run`, `vcsd nvmevirt check|load|unload`: a drive behind Linux's NVMe driver."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from csd_link.driveset import DriveSet
from csd_link.finding import Finding
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_drive
from nvmevirt_config.module import Reservation, check, load, unload
from vcsd.progress import status
from vcsd_cli.shared import Output, OutputOption, err, print_json, show, stdout

guest = typer.Typer(help="A virtual machine whose NVMe driver finds our drive.")
nvmevirt = typer.Typer(help="NVMeVirt on this machine: what it needs, loading it, unloading it.")

MAX_PROMPT = 32768  # what the guest makes up fits its memory


class Accelerator(StrEnum):
    """How QEMU runs the guest's instructions."""

    AUTO = "auto"
    KVM = "kvm"
    TCG = "tcg"


class Fabric(StrEnum):
    """How the guest connects to drives on the machine outside."""

    TCP = "tcp"


@guest.command("run")
def guest_run(
    drives: Annotated[int, typer.Option(min=1, max=4, help="drives, one window each on the same device")] = 2,
    tokens: Annotated[int, typer.Option(min=1, max=512, help="decode steps of the shipped model's shape")] = 16,
    prompt: Annotated[int, typer.Option(min=1, max=MAX_PROMPT, help="tokens that are stored first")] = 128,
    drive: Annotated[Path | None, typer.Option(help="YAML description of the drives (default: the paper's)")] = None,
    module: Annotated[Path | None, typer.Option(help="NVMeVirt's nvmev.ko, built for the guest's kernel")] = None,
    layers: Annotated[Path | None, typer.Option(help="q, k, v (.npz) to store past the kernel (default: some)")] = None,
    fabric: Annotated[
        Fabric | None, typer.Option(help="connect to drives that listen outside, by Linux's initiator (default: none)")
    ] = None,
    accelerator: Annotated[Accelerator, typer.Option(help="auto takes kvm where that works")] = Accelerator.AUTO,
    console: Annotated[Path | None, typer.Option(help="file for all that the guest says")] = None,
    timeout_s: Annotated[float | None, typer.Option(min=1, max=86400, help="for it (default: by the work)")] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Boot a Linux whose NVMe driver finds the drives, decode inside, and compare with decoding in this process."""
    from host_driver.passthrough import Layers
    from vcsd.guest import MADE_UP, GuestRun, run_guest
    from vcsd.guest_fabric import run_guest_over_fabric

    if fabric and (module or layers):
        raise ValueError("--fabric tcp: the machine has no NVMe drive then, so leave --module and --layers out")

    wanted = DriveSet(count=drives, spec=load_drive(drive) if drive else INSTCSD_ZYNQ7045_8CH)
    run = GuestRun(
        drives=wanted,
        prompt=prompt,
        tokens=tokens,
        module=module,
        layers=Layers.load(layers) if layers else MADE_UP,
        accelerator=accelerator.value,
        timeout_s=timeout_s,
        console=console,
    )
    with status("guest machine"):
        result = run_guest_over_fabric(run) if fabric else run_guest(run)
    if output is Output.JSON:
        print_json(result)
    else:
        flat = result | {f"past the kernel: {key}": value for key, value in result.get("passthrough", {}).items()}
        flat |= {f"id-ctrl {key}": value for key, value in result["id_ctrl"].items()}
        show("guest machine", {key: value for key, value in flat.items() if not isinstance(value, dict)}, output)
    if not result["equal"]:
        sys.exit(1)


MAX_MIB = 1 << 26  # 64 TiB, of any machine's memory
StartOption = Annotated[
    int, typer.Option("--start", min=1, max=MAX_MIB, help="MiB of memory at which the reservation begins")
]
SizeOption = Annotated[
    int, typer.Option("--size", min=2, max=MAX_MIB, help="MiB reserved, the first is the controller's")
]
CpusOption = Annotated[str, typer.Option("--cpus", help="cores of NVMeVirt: dispatcher, then workers")]


def _reservation(start: int, size: int, cpus: str) -> Reservation:
    try:
        cores = tuple(map(int, cpus.split(",")))
    except ValueError:
        raise ValueError(f"--cpus {cpus}: numbers with commas, as in 1,2") from None
    return Reservation(start_bytes=start << 20, size_bytes=size << 20, cpus=cores)


@nvmevirt.command("check")
def nvmevirt_check(
    start: StartOption = 1024, size: SizeOption = 256, cpus: CpusOption = "1,2", output: OutputOption = Output.NORMAL
) -> None:
    """Whether memory and cores are reserved and the module is loaded, and what to do where not."""
    reservation = _reservation(start, size, cpus)
    findings = check(reservation)
    if output is Output.JSON:
        arguments = [reservation.kernel_argument, reservation.isolation_argument]
        print_json(
            {
                "ready": all(each.ok for each in findings),
                "kernel_arguments": arguments,
                "module_options": reservation.module_options,
                "findings": [as_dict(each) for each in findings],
            }
        )
    else:
        stdout().print(findings_table("NVMeVirt", findings))
    if not all(each.ok for each in findings):
        sys.exit(1)


def as_dict(finding: Finding) -> dict[str, str | bool]:
    """A finding for programs."""
    return {"what": finding.what, "ok": finding.ok, "found": finding.found, "fix": "" if finding.ok else finding.fix}


def findings_table(title: str, findings: list[Finding]) -> Table:
    """Findings for people, with what to do about those that are not so."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "ok", "found", "what to do"):
        table.add_column(column)
    for each in findings:
        table.add_row(each.what, "yes" if each.ok else "no", each.found, "" if each.ok else each.fix)
    return table


@nvmevirt.command("load")
def nvmevirt_load(
    module: Annotated[Path, typer.Option(help="nvmev.ko, built after NVMeVirt's own README")],
    start: StartOption = 1024,
    size: SizeOption = 256,
    cpus: CpusOption = "1,2",
) -> None:
    """Insert NVMeVirt's module on the reserved memory."""
    reservation = _reservation(start, size, cpus)
    load(module, reservation)
    where = f"--window /dev/mem at byte {reservation.storage_start_bytes:#x}"
    err.print(f"{module.name} is loaded; its namespace lies in physical memory ({where}), see docs/drives.md")


@nvmevirt.command("unload")
def nvmevirt_unload() -> None:
    """Remove NVMeVirt's module."""
    unload()
