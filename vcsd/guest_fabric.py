"""A guest machine that connects to drives by NVMe/TCP, with Linux's own initiator and nvme-cli."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import csd_io
import csd_link
import csd_spec
import host_driver
from csd_link.medium import MappedMedium
from csd_link.nvmeof.device import Endpoint, NvmeDevice
from csd_link.nvmeof.listen import Listen, nqn_of
from csd_link.own_server import Placed, own_server
from csd_link.run_dir import private_dir, run_dir
from csd_link.served_drive import ServedDrive
from nvmevirt_config.guest import Guest, find_kernel, kernel_modules, make_root
from nvmevirt_config.module import Reservation
from vcsd.guest import FIGURES, GuestRun, boot, in_process
from vcsd.transport import FACTORY

PROGRAMS = {"nvme": "nvme-cli", "mke2fs": "e2fsprogs", "e2fsck": "e2fsprogs", "fstrim": "util-linux"}  # and packages
MODULES = "virtio_pci", "virtio_net", "nvme-fabrics", "nvme-tcp"
_LOOPBACK = "127.0.0.1"


def run_guest_over_fabric(run: GuestRun) -> dict[str, Any]:
    """Boot the guest machine and have it find and use drives that listen on this one; beside the same in this process.

    Raises OSError where something is missing or the guest does not answer.
    """
    kernel, began = find_kernel(), time.monotonic()
    files = {f"usr/sbin/{name}": _program(name, package) for name, package in PROGRAMS.items()}
    modules = enumerate(kernel_modules(kernel, MODULES))
    files |= {f"modules/{number:02}-{each.name}": each for number, each in modules}
    with tempfile.TemporaryDirectory(prefix="guest-", dir=private_dir(run_dir())) as scratch:
        folder = Path(scratch)
        root, memory = folder / "root.img", folder / "memory"
        make_root(root, [Path(each.__file__ or "").parent for each in (csd_spec, csd_io, csd_link, host_driver)], files)
        reservation = Reservation()
        MappedMedium.create(memory, reservation.end_bytes)
        listen = _listen(tuple(f"{folder.name}-{number}" for number in range(run.drives.count)))
        with own_server([_placed(run, listen, name) for name in listen.drives], folder, FACTORY.server):
            ports = ",".join(str(listen.port_of(name)) for name in listen.drives)
            guest = Guest(
                kernel=kernel,
                root=root,
                memory=memory,
                drive=None,
                scratch=None,
                words=(f"vcsd.ports={ports}", f"vcsd.prompt={run.prompt}", f"vcsd.tokens={run.tokens}"),
                reservation=reservation,
                network=True,
            )
            answer, used = boot(guest, run)
    ((way, decode),) = answer["decodes"].items()
    expected = in_process(run, decode["max_bytes"])
    differ = [f"{way}: {name}" for name in FIGURES if decode[name] != expected[name]]
    files_right = all(each["bytes_equal"] and each["fsck_clean"] for each in answer["filesystem"])
    trimmed = all(each["nuse_trimmed"] < each["nuse_with_file"] for each in answer["filesystem"])
    return {
        "fabric": "tcp",
        "accelerator": used,
        "kernel": kernel.name.removeprefix("vmlinuz-"),
        "discovered": answer["discovered"],
        "id_ctrl": {key: answer["id_ctrl"][key] for key in ("mn", "sn", "fr", "subnqn", "mdts")},
        "commands": answer["commands"],
        "filesystem": answer["filesystem"],
        "tokens": run.tokens,
        "decoded_over": decode["nodes"],
        "how": decode["how"],
        "equal": not differ and files_right and trimmed,
        "differ": differ,
        "decode_wall_s": {way: decode["wall_s"]},
        "wall_s": time.monotonic() - began,
    }


def _listen(names: tuple[str, ...]) -> Listen:
    """An address on this machine at which as many ports are free as there are drives."""
    while True:
        with ExitStack() as undo:
            first = undo.enter_context(socket.create_server((_LOOPBACK, 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + len(names)):
                    undo.enter_context(socket.create_server((_LOOPBACK, port)))
                return Listen(_LOOPBACK, first, names)


def _placed(run: GuestRun, listen: Listen, name: str) -> Placed:
    def locate() -> Endpoint:
        return Endpoint(_LOOPBACK, listen.port_of(name), nqn_of(name))

    drive = ServedDrive(name=name, spec=run.drives.spec, listen=listen, **run.drives.hosted(run.drives.count))
    return Placed(drive, partial(NvmeDevice, locate))


def _program(name: str, package: str) -> Path:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if not found:
        raise FileNotFoundError(f"{name} is missing: apt-get install {package}")
    return Path(found)
