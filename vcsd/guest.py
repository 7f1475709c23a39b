"""Decode inside a guest VM through the Linux NVMe driver, compared with the same decode in this process."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import csd_io
import csd_link
import csd_spec
import host_driver
from csd_firmware import InProcessDrive
from csd_link.connect import open_window
from csd_link.driveset import DriveSetConfig
from csd_link.medium import MappedMedium
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import private_dir, run_dir
from csd_link.served_drive import ServedDrive
from csd_link.window import BLOCK_BYTES, WindowLayout
from host_driver.driver import Driver
from host_driver.in_guest import SAYS
from host_driver.passthrough import LAYERS_FILE, Layers, digests
from host_driver.random_decode import SHIPPED_SHAPE, random_decode
from nvmevirt_config.guest import NVMEVIRT_MODEL, QEMU, QEMU_MODEL, Guest, find_kernel, make_root
from nvmevirt_config.module import Reservation
from vcsd.transport import FACTORY, open_drives

LAYOUT = WindowLayout(depth=4, slot_blocks=256)
WAYS = 2  # transports: block device and character device, each with its own drives
BOOT_S, STEP_S = 240.0, 0.5  # limits for software emulation on a busy machine: boot, and one drive's decode step
TOKEN_S = 0.006  # limit per token of the prompt
KVM_S, KVM_SILENCE_S = 60.0, 20.0  # limits for KVM: boot, and silence after which KVM counts as broken
SCRATCH_NSID = 2
SAME = ("bytes_equal", "output_equal", "deallocated")
MADE_UP = Layers.random(layers=4, tokens=2048, heads=4, group=2, dim=64)  # keys of a layer take four requests
FIGURES = ("outputs", "step_ns", "link_bytes", "pages_read")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestDecodeTest:
    """Parameters of a decode of `tokens` steps after a random prompt inside the guest VM.

    Attributes:
        drives: Drives; their firmware runs outside of the VM.
        prompt: Length of the prompt, tokens.
        tokens: Decode steps.
        module: NVMeVirt module; None: QEMU's NVMe drive.
        layers: Layers for the round trip through a namespace with NVMe passthrough.
        accelerator: `kvm`, `tcg`, or `auto` (kvm if it works).
        timeout_s: Time limit of the VM, seconds; None: estimated from the work.
        console: File for the console output.
    """

    drives: DriveSetConfig
    prompt: int
    tokens: int
    module: Path | None = None
    layers: Layers = MADE_UP
    accelerator: str = "auto"
    timeout_s: float | None = None
    console: Path | None = None

    def __post_init__(self) -> None:
        if self.module and not self.module.is_file():
            raise ValueError(f"module = {self.module}: no such file")

    def limit_s(self, boot_s: float) -> float:
        """Time limit of the VM for a given boot time, seconds."""
        return self.timeout_s or boot_s + STEP_S * self.drives.count * self.tokens + TOKEN_S * self.prompt

    def words(self, reservation: Reservation) -> tuple[str, ...]:
        """Arguments for the guest's init process on the kernel's command line."""
        numbers = (("drives", self.drives.count), ("prompt", self.prompt), ("tokens", self.tokens))
        words = [f"vcsd.{key}={value}" for key, value in numbers]
        words.append(f"vcsd.model={NVMEVIRT_MODEL if self.module else QEMU_MODEL}")
        if self.module:
            words.append(f"vcsd.module={'/'.join(reservation.module_options)}")
        else:
            words.append(f"vcsd.scratch={SCRATCH_NSID}")
        return tuple(words)


def run_guest(run: GuestDecodeTest) -> dict[str, Any]:
    """Boot the guest VM, decode in it, and compare with the same decode in this process.

    Raises:
        OSError: A program is missing, or the guest does not answer.
    """
    kernel, began = find_kernel(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="guest-", dir=private_dir(run_dir())) as scratch:
        folder = Path(scratch)
        root = folder / "root.img"
        packages = [Path(package.__file__ or "").parent for package in (csd_spec, csd_io, csd_link, host_driver)]
        run.layers.save(folder / LAYERS_FILE)
        make_root(root, [*packages, folder / LAYERS_FILE], {"module.ko": run.module} if run.module else {})
        reservation = Reservation()
        size = WAYS * run.drives.count * LAYOUT.blocks * BLOCK_BYTES
        memory, disk, past = folder / "memory", folder / "drive.raw", folder / "past.raw"
        MappedMedium.create(memory, reservation.end_bytes)
        MappedMedium.create(disk, size)
        MappedMedium.create(past, (2 * run.layers.k.nbytes >> 20) + 2 * len(run.layers.k) << 20)
        backing, at = (memory, reservation.storage_start_bytes) if run.module else (disk, 0)
        guest = Guest(
            kernel=kernel,
            root=root,
            memory=memory,
            drive=None if run.module else disk,
            scratch=None if run.module else past,
            kernel_args=run.words(reservation),
            reservation=reservation,
        )
        with _firmware(run.drives, backing, at, folder):
            answer, used = boot(guest, run)
        left_bytes = 512 * past.stat().st_blocks
    expected = in_process(run, LAYOUT.slot_bytes)
    decodes = answer["decodes"]
    differ = [f"{way}: {name}" for way, decode in decodes.items() for name in FIGURES if decode[name] != expected[name]]
    passed = _passthrough_result(answer.get("passthrough"), run.layers, left_bytes)
    return {
        "drive": "nvmevirt" if run.module else "qemu",
        "accelerator": used,
        "kernel": kernel.name.removeprefix("vmlinuz-"),
        "id_ctrl": answer["id_ctrl"],
        "tokens": run.tokens,
        "decoded_over": sorted(decodes),
        "equal": not differ and all(passed[figure] for figure in SAME if passed),
        "differ": differ,
        "passthrough": passed,
        "decode_wall_s": {way: decode["wall_s"] for way, decode in decodes.items()},
        "wall_s": time.monotonic() - began,
    }


def in_process(run: GuestDecodeTest, max_bytes: int) -> dict[str, Any]:
    """The same decode on drives in this process, with the guest's maximum command size."""
    with open_drives(run.drives) as devices:
        for device in devices:
            assert isinstance(device, InProcessDrive)
            device.max_bytes = max_bytes
        driver = Driver(devices, SHIPPED_SHAPE)
        expected = random_decode(driver, run.prompt, run.tokens)
        driver.close()
    return expected


def _passthrough_result(report: dict[str, Any] | None, layers: Layers, left_bytes: int) -> dict[str, Any]:
    """Result of the passthrough round trip, compared with this process; `left_bytes`: still allocated there."""
    if report is None:
        return {}
    expected = digests(layers, layers.tensors())
    return {name: report[name] for name in ("namespace", "how", "requests", "request_bytes", "depth", "wall_s")} | {
        "bytes_equal": report["tensors"] == expected["tensors"],
        "output_equal": report["outputs"] == expected["outputs"],
        "deallocated": report["zeros"] and not left_bytes,
    }


def _firmware(drives: DriveSetConfig, backing: Path, at: int, folder: Path) -> Any:
    """Serve the drives on the memory of the guest's device."""
    size = LAYOUT.blocks * BLOCK_BYTES
    names = [f"{folder.name}-{number}" for number in range(WAYS * drives.count)]
    served = [
        ServedDrive(
            name=name,
            spec=drives.spec,
            layout=LAYOUT,
            device=backing,
            offset_bytes=at + number * size,
            **drives.hosting_fields(drives.count),
        )
        for number, name in enumerate(names)
    ]
    connects = [partial(open_window, backing, number, at) for number in range(WAYS * drives.count)]
    return own_server(list(map(ServerEndpoint, served, connects)), folder, FACTORY.server)


def boot(guest: Guest, run: GuestDecodeTest) -> tuple[dict[str, Any], str]:
    """Boot the guest VM; falls back from KVM to software emulation.

    Returns:
        The guest's result, and the accelerator used.

    Raises:
        OSError: QEMU is missing, or the guest does not answer.
    """
    if not shutil.which(QEMU):
        raise FileNotFoundError(f"{QEMU} is missing: apt-get install qemu-system-x86")
    names = ["kvm", "tcg"] if run.accelerator == "auto" else [run.accelerator]
    console = ["nothing"]
    for name in names:
        last = name == names[-1]
        if name == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
            continue
        limits_s = (run.limit_s(BOOT_S),) * 2 if last else (run.limit_s(KVM_S), KVM_SILENCE_S)
        with suppress(*(() if last else (TimeoutError,))):
            console = guest.run("tcg,thread=multi" if name == "tcg" else name, *limits_s, SAYS) or console
        if run.console:
            run.console.write_text("\n".join(console))
        said = [line for line in console if line.startswith(SAYS)]
        if said:
            answer = json.loads(said[0].removeprefix(SAYS))
            if "error" in answer:
                raise OSError(f"guest VM: {answer['error']}")
            return answer, name
    raise OSError(f"the guest VM gave no result; its last output: {' | '.join(console[-3:])}")
