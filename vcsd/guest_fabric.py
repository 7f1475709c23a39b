"""Guest VM that connects to drives by NVMe/TCP with Linux's initiator and nvme-cli."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import csd_io
import csd_link
import csd_spec
import host_driver
from csd_link.medium import MappedMedium
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.listen import Listen, nqn_of
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import private_dir, run_dir
from csd_link.served_drive import ServedDrive
from nvmevirt_config.guest import Guest, find_kernel, kernel_modules, make_root
from nvmevirt_config.module import Reservation
from vcsd.guest import FIGURES, GuestDecodeTest, boot, in_process
from vcsd.transport import FACTORY

PROGRAMS = {  # and the packages they are in
    "nvme": "nvme-cli",
    "mke2fs": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "fstrim": "util-linux",
    "fio": "fio",
}
MODULES = "virtio_pci", "virtio_net", "nvme-fabrics", "nvme-tcp"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestWork:
    """Work of a guest VM with the drives it is connected to.

    Attributes:
        then: Module whose `use` is called in the guest.
        words: Arguments, on the kernel's command line.
        packages: Folders and files to import there, in addition to the host driver.
        files: Other files by target path; libraries of programs among them are added.
        memory_bytes: Memory of the VM; None: enough for a decode.
    """

    then: str
    words: Mapping[str, object]
    packages: Sequence[Path] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    memory_bytes: int | None = None


def run_guest_over_fabric(run: GuestDecodeTest) -> dict[str, Any]:
    """Boot the guest VM, use drives that listen on this machine, and compare with a decode in this process.

    Raises:
        OSError: A program is missing, or the guest does not answer.
    """
    began = time.monotonic()
    words = {"prompt": run.prompt, "tokens": run.tokens}
    answer, used = answer_over_fabric(run, GuestWork(then="host_driver.in_guest_tools", words=words))
    ((way, decode),) = answer["decodes"].items()
    expected = in_process(run, decode["max_bytes"])
    differ = [f"{way}: {name}" for name in FIGURES if decode[name] != expected[name]]
    files_right = all(drive["bytes_equal"] and drive["fsck_clean"] for drive in answer["filesystem"])
    trimmed = all(drive["nuse_trimmed"] < drive["nuse_with_file"] for drive in answer["filesystem"])
    over_paths = [paths[which] for paths in answer["paths"].values() for which in ("both", "alone")]
    checked = not any(fio["error"] for fio in (answer["fio"], *over_paths))
    return {
        "fabric": "tcp",
        "accelerator": used,
        "kernel": answer["kernel"],
        "discovered": answer["discovered"],
        "id_ctrl": {key: answer["id_ctrl"][key] for key in ("mn", "sn", "fr", "subnqn", "mdts")},
        "commands": answer["commands"],
        "values_equal": answer["values_equal"],
        "filesystem": answer["filesystem"],
        "fio": answer["fio"],
        "paths": answer["paths"],
        "tokens": run.tokens,
        "decoded_over": decode["nodes"],
        "how": decode["how"],
        "equal": not differ and answer["values_equal"] and files_right and trimmed and checked,
        "differ": differ,
        "decode_wall_s": {way: decode["wall_s"]},
        "wall_s": time.monotonic() - began,
    }


def answer_over_fabric(
    run: GuestDecodeTest, work: GuestWork, served: Callable[[Sequence[str]], None] = lambda names: None
) -> tuple[dict[str, Any], str]:
    """Serve drives, boot a guest VM that connects to them, and run its work.

    Args:
        run: Drives, time limits and accelerator; other fields are ignored.
        work: Work of the guest.
        served: Called with the names of the drives when they answer.

    Returns:
        The guest's result with its kernel release, and the accelerator used.

    """
    kernel = find_kernel()
    files = dict(work.files) | {f"usr/sbin/{name}": _program(name, package) for name, package in PROGRAMS.items()}
    modules = enumerate(kernel_modules(kernel, MODULES))
    files |= {f"modules/{number:02}-{module.name}": module for number, module in modules}
    with tempfile.TemporaryDirectory(prefix="guest-", dir=private_dir(run_dir())) as scratch:
        folder = Path(scratch)
        root, memory = folder / "root.img", folder / "memory"
        ours = [Path(package.__file__ or "").parent for package in (csd_spec, csd_io, csd_link, host_driver)]
        make_root(root, [*ours, *work.packages], files)
        reservation = Reservation() if work.memory_bytes is None else Reservation(start_bytes=work.memory_bytes)
        MappedMedium.create(memory, reservation.end_bytes)
        listen = _listen(tuple(f"{folder.name}-{number}" for number in range(run.drives.count)))
        with own_server(
            [
                _place_drive(run, listen, name, path)
                for name, path in zip(listen.drives, run.drives.folders, strict=True)
            ],
            folder,
            FACTORY.server,
        ):
            served(listen.drives)
            ports = ",".join(str(listen.port_of(name)) for name in listen.drives)
            words = dict(work.words) | {"ports": ports, "then": work.then}
            guest = Guest(
                kernel=kernel,
                root=root,
                memory=memory,
                drive=None,
                scratch=None,
                kernel_args=tuple(f"vcsd.{key}={value}" for key, value in words.items()),
                reservation=reservation,
                network=True,
            )
            answer, used = boot(guest, run)
    return answer | {"kernel": kernel.name.removeprefix("vmlinuz-")}, used


def _listen(names: tuple[str, ...]) -> Listen:
    """Find an address on this machine with consecutive free ports, one per drive."""
    while True:
        with ExitStack() as undo:
            first = undo.enter_context(socket.create_server((_LOOPBACK, 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + len(names)):
                    undo.enter_context(socket.create_server((_LOOPBACK, port)))
                return Listen(_LOOPBACK, first, names)


def _place_drive(run: GuestDecodeTest, listen: Listen, name: str, path: Path | None) -> ServerEndpoint:
    def locate() -> Endpoint:
        return Endpoint(_LOOPBACK, listen.port_of(name), nqn_of(name))

    hosted = run.drives.hosting_fields(run.drives.count)
    drive = ServedDrive(name=name, spec=run.drives.spec, path=path and path.absolute(), listen=listen, **hosted)
    return ServerEndpoint(drive, partial(NvmeDrive, locate))


def _program(name: str, package: str) -> Path:
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if not program:
        raise FileNotFoundError(f"{name} is missing: apt-get install {package}")
    return Path(program)
