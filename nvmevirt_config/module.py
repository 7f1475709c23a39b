"""NVMeVirt on this machine: checks required memory and cores, loads and unloads the kernel module."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Annotated

from pydantic import Field

from csd_link.diagnosis import Finding
from csd_spec.checked import frozen_value

MODULE = "nvmev"
STORAGE_OFFSET_BYTES = 1 << 20  # offset of the storage; the controller's registers come before it
MAX_CPUS = 1024


@frozen_value
class Reservation:
    """Physical memory and cores reserved for NVMeVirt.

    Attributes:
        start_bytes: Physical address of the memory.
        size_bytes: Size of the memory, bytes.
        cpus: Cores; the first one dispatches commands, the others move data.
    """

    start_bytes: Annotated[int, Field(gt=0, multiple_of=1 << 20)] = 1024 << 20
    size_bytes: Annotated[int, Field(ge=2 << 20, multiple_of=1 << 20)] = 256 << 20  # the first MiB is the controller's
    cpus: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        cpus = set(self.cpus)
        if len(cpus) != len(self.cpus) or len(cpus) < 2 or not cpus < set(range(MAX_CPUS)):
            raise ValueError(f"cpus = {self.cpus}: must be a dispatcher and at least one worker, without duplicates")

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.size_bytes

    @property
    def storage_start_bytes(self) -> int:
        """Physical address of the namespace's first byte."""
        return self.start_bytes + STORAGE_OFFSET_BYTES

    @property
    def kernel_argument(self) -> str:
        """Kernel argument that reserves the memory (escape the dollar sign in boot loader files)."""
        return f"memmap={self.size_bytes >> 20}M${self.start_bytes >> 20}M"

    @property
    def isolation_argument(self) -> str:
        return f"isolcpus={','.join(map(str, self.cpus))}"

    @property
    def module_options(self) -> tuple[str, ...]:
        return (
            f"memmap_start={self.start_bytes >> 20}M",
            f"memmap_size={self.size_bytes >> 20}M",
            f"cpus={','.join(map(str, self.cpus))}",
        )


def check(reservation: Reservation, root: Path = Path("/")) -> list[Finding]:
    """Check the requirements of NVMeVirt on this machine; `root` contains /proc and /sys, for tests."""
    command_line = (root / "proc/cmdline").read_text()
    reserved = _reserved(command_line)
    wanted = reservation.start_bytes, reservation.size_bytes
    there = any(start <= wanted[0] and wanted[0] + wanted[1] <= start + size for start, size in reserved)
    grub = "GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub and reboot"
    argument = reservation.kernel_argument.replace("$", "\\\\\\$")
    isolated = _cpus((root / "sys/devices/system/cpu/isolated").read_text())
    online = _cpus((root / "sys/devices/system/cpu/online").read_text())
    parameters = root / f"sys/module/{MODULE}/parameters"
    loaded = (root / f"sys/module/{MODULE}").exists()
    findings = [
        Finding(
            "memory is reserved",
            there,
            ", ".join(f"{size >> 20}M at {start >> 20}M" for start, size in reserved)
            or "no memmap= on the command line",
            f"add {argument} to {grub}",
        ),
        Finding(
            "cores are online",
            set(reservation.cpus) <= online,
            f"{len(online)} online",
            f"name cores of 0 to {len(online) - 1} with --cpus",
        ),
        Finding(
            "cores are isolated",
            set(reservation.cpus) <= isolated,
            ", ".join(map(str, sorted(isolated))) or "none",
            f"add {reservation.isolation_argument} to {grub}",
        ),
        Finding(
            "module is loaded",
            loaded,
            "yes" if loaded else "no",
            "vcsd guest load --module PATH/nvmev.ko (built according to NVMeVirt's README)",
        ),
    ]
    if loaded:
        size = _bytes((parameters / "memmap_size").read_text())
        findings.append(
            Finding(
                "module has the size of the reservation",
                size == reservation.size_bytes,
                f"{size >> 20}M",
                "vcsd guest unload, then load it with the same --size",
            )
        )
    return findings


def load(module: Path, reservation: Reservation) -> None:
    """Insert the module; raises OSError with the kernel's message."""
    if not module.is_file():
        raise FileNotFoundError(f"{module}: no such module: build it according to NVMeVirt's README")
    for finding in check(reservation)[:2]:
        if not finding.ok:
            raise OSError(f"{finding.what}: no ({finding.found}): {finding.fix}")
    _run("insmod", str(module), *reservation.module_options)


def unload() -> None:
    """Remove the module."""
    _run("rmmod", MODULE)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")


def _reserved(command_line: str) -> list[tuple[int, int]]:
    """Start and size of every memmap=SIZE$START on a kernel command line."""
    matches = re.findall(r"memmap=(\w+)\$(\w+)", command_line)
    return [(_bytes(start), _bytes(size)) for size, start in matches]


def _bytes(text: str) -> int:
    """Parse a number in the kernel's syntax: 0x for hexadecimal, suffix K, M or G."""
    text = text.strip()
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if factor > 1 else text, 0) * factor


def _cpus(text: str) -> set[int]:
    """Parse a list in the kernel's syntax: 0-3,7."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
