"""Ways to reach drives: in this process, a process each, mounted, or behind a window on any file or block device."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from csd_firmware import InProcessDevice
from csd_link.connect import beating, connect, open_window
from csd_link.host_end import Lost, WindowDevice
from csd_link.medium import FileMedium, MappedMedium
from csd_link.recovery import LastingDevice
from csd_link.serving import private_dir, run_dir, window_name
from csd_link.window import BLOCK_BYTES, MAGIC, WindowLayout
from csd_spec import Device, DriveSpec

TRANSPORT_HELP = "way to the drives: inproc, process, fuse, or window:PATH (a file or block device)"
START_S = 60.0

Connect = Callable[[], WindowDevice]


@contextmanager
def open_drives(
    transport: str, count: int, spec: DriveSpec, keep: Path | None = None, restart: bool = True
) -> Iterator[list[Device]]:
    """`count` drives, reached as `transport` says, until the block ends.

    Those of `inproc`, `process` and `fuse` are made for it; keep: a folder in which they outlive it. The drives of
    `window:PATH` are those that are served there; on a new file they are made for it, too. restart: whether drives that
    are made with a process of their own are begun again when they die.
    Raises ValueError for a transport that there is none of, ConnectionError where no drive answers.
    """
    check_transport(transport)
    kind, _, where = transport.partition(":")
    paths = [keep / f"drive{number}" if keep else None for number in range(count)]
    with ExitStack() as undo:
        makers: Sequence[Callable[[], Device]]
        if kind == "inproc":
            makers = [partial(InProcessDevice, spec, path) for path in paths]
        else:
            connects = undo.enter_context(_remote(kind, Path(where), spec, paths, restart))
            makers = [partial(LastingDevice, connect) for connect in connects]
        devices = []
        for make in makers:
            devices.append(make())
            undo.callback(devices[-1].close)
        yield devices


def check_transport(transport: str) -> None:
    """Raise ValueError for a transport that there is none of."""
    kind, colon, where = transport.partition(":")
    if kind == "window" and not where:
        raise ValueError("transport = window: needs a path, as window:/dev/nvme0n1")
    if kind not in ("inproc", "process", "fuse", "window") or (colon and kind != "window"):
        raise ValueError(f"transport = {transport!r}: must be inproc, process, fuse or window:PATH")


@contextmanager
def _remote(
    kind: str, where: Path, spec: DriveSpec, paths: Sequence[Path | None], restart: bool
) -> Iterator[Sequence[Connect]]:
    """How to connect to each of the drives."""
    if kind == "window" and _is_served(where):
        yield [partial(open_window, where, number) for number in range(len(paths))]
        return
    with tempfile.TemporaryDirectory(prefix="run-", dir=private_dir(run_dir())) as folder:
        drives = [_entry(f"{Path(folder).name}-{number}", spec, path) for number, path in enumerate(paths)]
        connects: list[Connect] = [
            partial(connect, run_dir() / drive["name"] / window_name("default")) for drive in drives
        ]
        size = WindowLayout().blocks * BLOCK_BYTES
        for number, drive in enumerate(drives):
            if kind == "window":
                drive |= {"device": str(where.absolute()), "offset_bytes": number * size}
                connects[number] = partial(open_window, where, number)
            elif kind == "fuse":
                mount = Path(folder) / f"mount{number}"
                mount.mkdir(mode=0o700)
                drive["mount"] = str(mount)
                connects[number] = partial(open_window, mount / "window")
        if kind == "window":
            make_window_file(where, len(paths) * size)
        with serving({"drives": drives}, Path(folder), connects, restart):
            yield connects


def _entry(name: str, spec: DriveSpec, path: Path | None) -> dict[str, Any]:
    return {"name": name, "drive": asdict(spec), "path": str(path.absolute()) if path else None}


def _is_served(where: Path) -> bool:
    """Whether a drive answers there; raises ValueError for what holds something else."""
    if not where.exists():
        return False
    if where.is_file() and where.stat().st_size == 0:
        return False
    medium = FileMedium(where)
    try:
        if beating(medium):
            return True
        if not where.is_file():
            raise Lost(f"no drive answers at {where}: serve one there first (vcsd serve --window {where})")
        return False
    finally:
        medium.close()


def make_window_file(where: Path, size_bytes: int) -> None:
    """Make a file for windows, or let one that holds windows have the size; raises ValueError for any other."""
    if not where.exists():
        MappedMedium.create(where, size_bytes)
    elif where.is_file():
        with where.open("r+b") as file:
            begins = file.read(len(MAGIC))
            if begins.strip(b"\0") and begins != MAGIC:
                raise ValueError(f"{where} holds something else than a window: name a new file")
            file.truncate(max(size_bytes, where.stat().st_size))


@contextmanager
def serving(
    config: dict[str, Any], folder: Path, connects: Sequence[Connect], restart: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A `vcsd serve` of its own for the time of the block; it has begun when every drive answers."""
    file = folder / "serve.yaml"
    file.write_text(json.dumps(config | {"restart": restart}))
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", "serve", str(file), "--quiet"]
    log = (folder / "serve.log").open("w+")
    server = subprocess.Popen(command, stderr=log, text=True)
    try:
        for attach in connects:
            _await(attach, server, folder / "serve.log")
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        log.close()
        for drive in config["drives"]:
            shutil.rmtree(run_dir() / drive["name"], ignore_errors=True)


def _await(attach: Connect, server: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            attach().close()
            return
        except (Lost, OSError) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                said = log.read_text().strip().splitlines() or [str(error)]
                raise ConnectionError(f"drives did not start: {said[-1]}") from error
            time.sleep(0.02)
