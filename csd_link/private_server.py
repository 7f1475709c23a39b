"""Private drives of a run, served by a child process for the duration of the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from csd_link.connect import Connect
from csd_link.driveset import DriveSetConfig
from csd_link.host_end import DriveLostError
from csd_link.liveness import cpu_ticks
from csd_link.plain_device import PlainDrive
from csd_link.recovery import RecoveringDrive
from csd_link.run_dir import drive_dir, private_dir, run_dir
from csd_link.served_drive import ServedDrive, ServedDrives
from csd_spec import Drive

IDLE_START_S = 60.0  # startup timeout without any CPU time used, seconds
COMPILES = "compiling kernels (first run only)"  # printed by a server to stderr
compiling = 0  # number of starting servers that are compiling


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """A drive to serve, and how to connect to it."""

    drive: ServedDrive
    connect: Connect


Place = Callable[
    [ServedDrive, int, Path], ServerEndpoint
]  # arguments: drive, its number in the set, temporary folder of the run


@contextmanager
def open_devices(connects: Sequence[Connect], recovery_s: float) -> Iterator[list[Drive]]:
    """Open served drives, which may die and be restarted meanwhile; recovery_s: see `DriveSetConfig`."""
    with ExitStack() as undo:
        devices = list[Drive]()
        for connect in connects:
            devices.append(RecoveringDrive(connect, recovery_s) if recovery_s else PlainDrive(connect))
            undo.callback(devices[-1].close)
        yield devices


@contextmanager
def own_drives(drives: DriveSetConfig, server: Sequence[str], place: Place) -> Iterator[list[Drive]]:
    """Serve a set of drives in a child process for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=private_dir(run_dir())) as folder:
        scratch = Path(folder)
        placed = [
            place(
                ServedDrive(
                    name=f"{scratch.name}-{number}",
                    spec=drives.spec,
                    path=path.absolute() if path else None,
                    restarts=drives.restart_drives,
                    methods_file=drives.methods_file.absolute() if drives.methods_file else None,
                    layouts_file=drives.layouts_file.absolute() if drives.layouts_file else None,
                    **drives.hosting_fields(drives.total),
                ),
                number,
                scratch,
            )
            for number, path in enumerate(drives.folders)
        ]
        connects = [endpoint.connect for endpoint in placed]
        with own_server(placed, scratch, server), open_devices(connects, drives.recovery_s) as devices:
            yield devices


@contextmanager
def own_server(
    placed: Sequence[ServerEndpoint], scratch: Path, server: Sequence[str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a server process for the duration of the block, which begins when every drive answers.

    Args:
        placed: Drives to serve.
        scratch: Temporary folder; the server removes it.
        server: Command. The configuration file and this process's PID are appended as arguments: the server stops and
            removes `scratch` when this process exits for any reason.
    """
    drives = ServedDrives(tuple(endpoint.drive for endpoint in placed))
    file, log = scratch / "serve.json", scratch / "serve.log"
    file.write_text(drives.to_json())
    with log.open("w") as errors:
        process = subprocess.Popen([*server, str(file), str(os.getpid())], stderr=errors, text=True)
    try:
        for endpoint in placed:
            _await(endpoint.connect, process, log)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        for drive in drives.drives:
            shutil.rmtree(drive_dir(drive.name), ignore_errors=True)


def _await(connect: Connect, server: subprocess.Popen[str], log: Path) -> None:
    """Wait for a drive while its server makes progress; raises ConnectionError if the server exits or hangs."""
    global compiling
    worked, ticks, told = time.monotonic(), 0, False
    try:
        while True:
            try:
                connect().close()
                return
            except (DriveLostError, OSError) as error:
                if (now := cpu_ticks(server.pid)) != ticks:
                    worked, ticks = time.monotonic(), now
                said = log.read_text().strip().splitlines()
                if server.poll() is not None or time.monotonic() - worked > IDLE_START_S:
                    raise ConnectionError(f"drives did not start: {(said or [str(error)])[-1]}") from error
                if not told and said and COMPILES in said[-1]:
                    compiling, told = compiling + 1, True
                time.sleep(0.02)
    finally:
        compiling -= told
