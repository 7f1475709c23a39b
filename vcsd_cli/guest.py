"""`vcsd guest`: drives under the Linux NVMe driver, in a QEMU guest or with NVMeVirt."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from csd_link.diagnosis import Finding
from csd_link.driveset import DriveSetConfig
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_drive
from nvmevirt_config.module import Reservation, check, load, unload
from vcsd.progress import status
from vcsd_cli.shared import Output, OutputOption, print_json, report_done, show, stdout

guest = typer.Typer(help="Run drives under the Linux NVMe driver: in a QEMU guest, or with NVMeVirt on this machine.")

MAX_PROMPT = 32768  # the random prompt fits in the guest's memory


class QemuAccelerator(StrEnum):
    """QEMU accelerator."""

    AUTO = "auto"
    KVM = "kvm"
    TCG = "tcg"


class Fabric(StrEnum):
    """Transport from the guest to drives outside of it."""

    TCP = "tcp"


@guest.command("run")
def guest_run(
    drives: Annotated[int, typer.Option(min=1, max=4, help="drives, one window each on the same device")] = 2,
    tokens: Annotated[int, typer.Option(min=1, max=512, help="decode steps, with the bundled model's shape")] = 16,
    prompt: Annotated[
        int, typer.Option("--prompt-tokens", min=1, max=MAX_PROMPT, help="tokens stored before the first step")
    ] = 128,
    drive: Annotated[
        Path | None, typer.Option("--drive-config", help="YAML description of the drives (default: the paper's)")
    ] = None,
    module: Annotated[Path | None, typer.Option(help="NVMeVirt's nvmev.ko, built for the guest's kernel")] = None,
    layers: Annotated[
        Path | None, typer.Option("--layers-file", help="q, k, v (.npz) for NVMe passthrough (default: random)")
    ] = None,
    fabric: Annotated[
        Fabric | None, typer.Option(help="connect by NVMe/TCP to drives outside of the guest (default: no)")
    ] = None,
    accelerator: Annotated[
        QemuAccelerator, typer.Option(help="QEMU accelerator (auto: kvm or tcg)")
    ] = QemuAccelerator.AUTO,
    console: Annotated[Path | None, typer.Option(help="file for the guest's console output")] = None,
    timeout_s: Annotated[float | None, typer.Option(min=1, max=86400, help="time limit, s (default: by work)")] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Decode in a guest VM through its NVMe driver, and compare with a decode in this process."""
    from host_driver.passthrough import Layers
    from vcsd.guest import MADE_UP, GuestDecodeTest, run_guest
    from vcsd.guest_fabric import run_guest_over_fabric

    if fabric and (module or layers):
        raise ValueError("--fabric tcp: the guest has no NVMe drive: remove --module and --layers-file")

    wanted = DriveSetConfig(count=drives, spec=load_drive(drive) if drive else INSTCSD_ZYNQ7045_8CH)
    run = GuestDecodeTest(
        drives=wanted,
        prompt=prompt,
        tokens=tokens,
        module=module,
        layers=Layers.load(layers) if layers else MADE_UP,
        accelerator=accelerator.value,
        timeout_s=timeout_s,
        console=console,
    )
    with status("guest VM"):
        result = run_guest_over_fabric(run) if fabric else run_guest(run)
    if output is Output.JSON:
        print_json(result)
    else:
        flat = result | {f"passthrough: {key}": value for key, value in result.get("passthrough", {}).items()}
        flat |= {f"id-ctrl {key}": value for key, value in result["id_ctrl"].items()}
        show("guest VM", {key: value for key, value in flat.items() if not isinstance(value, dict)}, output)
    if not result["equal"]:
        sys.exit(1)


MAX_MIB = 1 << 26  # 64 TiB, more than any machine's memory
StartOption = Annotated[int, typer.Option("--start", min=1, max=MAX_MIB, help="start of the reserved memory, MiB")]
SizeOption = Annotated[int, typer.Option("--size", min=2, max=MAX_MIB, help="size of the reserved memory, MiB")]
CpusOption = Annotated[str, typer.Option("--cpus", help="cores of NVMeVirt: dispatcher, then workers")]


def _reservation(start: int, size: int, cpus: str) -> Reservation:
    try:
        cores = tuple(map(int, cpus.split(",")))
    except ValueError:
        raise ValueError(f"--cpus {cpus}: must be numbers with commas, such as 1,2") from None
    return Reservation(start_bytes=start << 20, size_bytes=size << 20, cpus=cores)


def as_dict(finding: Finding) -> dict[str, str | bool]:
    """A finding for JSON output."""
    return {"what": finding.what, "ok": finding.ok, "found": finding.found, "fix": "" if finding.ok else finding.fix}


def findings_table(title: str, findings: list[Finding]) -> Table:
    """A table of findings, with fixes for failed ones."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "ok", "found", "what to do"):
        table.add_column(column)
    for finding in findings:
        table.add_row(finding.what, "yes" if finding.ok else "no", finding.found, "" if finding.ok else finding.fix)
    return table


@guest.command("load")
def guest_load(
    module: Annotated[Path | None, typer.Option(help="nvmev.ko, built as in NVMeVirt's README")] = None,
    start: StartOption = 1024,
    size: SizeOption = 256,
    cpus: CpusOption = "1,2",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only check that memory and cores are reserved; print fixes")
    ] = False,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Load the NVMeVirt module on the reserved memory of this machine, as root."""
    reservation = _reservation(start, size, cpus)
    if dry_run:
        _report(reservation, output)
        return
    if module is None:
        raise ValueError("name the module: --module nvmev.ko, or check the machine with --dry-run")
    load(module, reservation)
    where = f"--window-device /dev/mem at byte {reservation.storage_start_bytes:#x}"
    done = {"module": str(module), "window_device": "/dev/mem", "offset_bytes": reservation.storage_start_bytes}
    report_done(
        f"{module.name} is loaded; its namespace is in physical memory ({where}), see docs/drives.md", done, output
    )


def _report(reservation: Reservation, output: Output) -> None:
    """Print what NVMeVirt needs of this machine; exit code 1 if something is missing."""
    findings = check(reservation)
    if output is Output.JSON:
        print_json(
            {
                "ready": all(finding.ok for finding in findings),
                "kernel_arguments": [reservation.kernel_argument, reservation.isolation_argument],
                "module_options": reservation.module_options,
                "findings": [as_dict(finding) for finding in findings],
            }
        )
    else:
        stdout().print(findings_table("NVMeVirt", findings))
    if not all(finding.ok for finding in findings):
        sys.exit(1)


@guest.command("unload")
def guest_unload() -> None:
    """Unload the NVMeVirt module."""
    unload()
