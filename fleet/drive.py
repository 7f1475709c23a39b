"""Drive of a fleet on its node: its server process, and its row in the table. Runs inside a Ray actor."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from csd_link.fleet_table import Member
from csd_link.liveness import is_running
from csd_link.nvmeof.listen import AllowedHost, Listen, nqn_of
from csd_link.nvmeof.target import is_loopback
from csd_link.run_dir import drive_dir, pid_path, port_path, private_dir, run_dir
from csd_link.served_drive import ServedDrive, ServedDrives
from csd_spec.drive import DriveSpec

POLL_INTERVAL_S, STOP_TIMEOUT_S, OLD_SERVER_TIMEOUT_S = 0.3, 10.0, 15.0
MAX_FAILED_STARTS = 5

Publish = Callable[[Member], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Configuration of a drive for a node.

    Attributes:
        fleet: Identifier of the fleet.
        name: Name of the drive.
        host_nqn: NQN of the only host that may connect.
        spec: `DriveSpec` as a dictionary.
        flash: Folder for flash; empty is the run folder.
        hosted: `HostingOptions` that are set.
        server: Python arguments that start a server; the file of drives and the owner's PID are appended.
    """

    fleet: str
    name: str
    host_nqn: str
    spec: dict[str, Any]
    flash: str
    hosted: dict[str, Any]
    server: tuple[str, ...]

    @property
    def base(self) -> Path:
        """Folder of the fleet's files on a node."""
        return run_dir() / f"fleet-{self.fleet}"

    @property
    def flash_root(self) -> Path:
        """Folder of the fleet's flash on a node."""
        return Path(self.flash) / f"fleet-{self.fleet}" if self.flash else self.base / "flash"


def served_name(assignment: Assignment, generation: int) -> str:
    """Name of a generation's server, unique on a machine."""
    return f"{assignment.name}.{generation}-{assignment.fleet}"


def place(assignment: Assignment, before: Member | None, node: str, host: str) -> Member:
    """Create the row with which a drive starts on a node.

    If the flash of the previous generation is on this node, it is reused, with the same address and NQN. On another
    node, a new generation starts with empty flash.
    """
    is_here = before is not None and before.node == node
    if before and is_here and (assignment.flash_root / served_name(assignment, before.generation)).is_dir():
        return replace(before, state="starting", restarts=before.restarts + 1, reason="")
    generation = before.generation + 1 if before else 1
    return Member(
        name=assignment.name,
        generation=generation,
        state="starting",
        node=node,
        host=host,
        port=_free_port(host),
        nqn=nqn_of(served_name(assignment, generation)),
        is_spare=assignment.name.startswith("spare"),
        since_s=time.time(),
    )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as free:
        port: int = free.getsockname()[1]
    return port


class FleetDrive:
    """Runs a drive's server, and publishes its row whenever it changes."""

    def __init__(self, assignment: Assignment, member: Member, publish: Publish) -> None:
        self._assignment, self._member, self._publish = assignment, member, publish
        self._served = served_name(assignment, member.generation)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = private_dir(private_dir(assignment.base) / "logs") / f"{self._served}.log"
        self._left, self._pid = (
            self._drive_pid(),
            0,
        )  # drive processes: of the previous actor; the current one
        publish(member)
        self._thread = threading.Thread(target=self._run, name=self._served, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the server; hosts lose the drive."""
        self._stopping.set()
        self._thread.join()
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(drive_dir(self._served), ignore_errors=True)

    def remove_files(self) -> None:
        """Remove all files of the fleet on this node; its drives must have stopped."""
        shutil.rmtree(self._assignment.base, ignore_errors=True)
        shutil.rmtree(self._assignment.flash_root, ignore_errors=True)

    def _run(self) -> None:
        """Run the server, restarting it when it exits, until `stop`."""
        failed, has_answered = 0, self._member.restarts > 0
        try:
            self._await_old_server()
            while not self._stopping.is_set() and failed < MAX_FAILED_STARTS:
                self._start()
                answered = self._watch()
                if self._stopping.is_set():
                    return
                has_answered |= answered
                failed = 0 if answered else failed + 1
                if not has_answered:  # the port may be taken; hosts do not know it yet
                    self._update_row(port=_free_port(self._member.host))
            self._update_row(state="lost", reason=self._last_log_line())
        except (OSError, ValueError) as error:
            self._update_row(state="lost", reason=str(error))

    def _watch(self) -> bool:
        """Monitor the server until it exits; returns whether it has ever answered."""
        assert self._process
        answered = False
        while not self._stopping.wait(POLL_INTERVAL_S) and self._process.poll() is None:
            if not answered and self._answers():
                answered = True
                self._update_row(state="up")
            if (pid := self._drive_pid()) not in (0, self._left, self._pid):
                if self._pid:
                    self._update_row(restarts=self._member.restarts + 1)
                self._pid = pid
        return answered

    def _start(self) -> None:
        assignment, member = self._assignment, self._member
        drive = ServedDrive(
            name=self._served,
            spec=DriveSpec.from_dict(assignment.spec),
            path=private_dir(assignment.flash_root) / self._served,
            listen=Listen(member.host, member.port, (self._served,), (AllowedHost(assignment.host_nqn),)),
            **assignment.hosted,
        )
        # One folder per actor: a server whose owner has exited removes the folder of its file
        folder = private_dir(assignment.base / f"{self._served}-{os.getpid()}")
        file = folder / "serve.json"
        file.touch(mode=0o600)
        file.write_text(ServedDrives((drive,)).to_json())
        with self._log.open("ab") as errors:
            command = [sys.executable, *assignment.server, str(file), str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        self._pid_file.write_text(str(self._process.pid))
        self._update_row(pid=self._process.pid, state="starting")

    @property
    def _pid_file(self) -> Path:
        return self._log.with_suffix(".pid")

    def _await_old_server(self) -> None:
        """Wait for the processes of a killed actor, which hold the flash and the port until they exit."""
        old, deadline = list[int](), time.monotonic() + OLD_SERVER_TIMEOUT_S
        with suppress(OSError, ValueError):
            old.append(int(self._pid_file.read_text()))
        if self._left:
            old.append(self._left)
        if old:
            while any(map(is_running, old)) and time.monotonic() < deadline:
                if self._stopping.wait(POLL_INTERVAL_S):
                    break

    def _answers(self) -> bool:
        try:
            is_ours = port_path(self._served).read_text() == str(self._member.port)
            socket.create_connection((self._member.host, self._member.port), POLL_INTERVAL_S).close()
            return is_ours
        except OSError:
            return False

    def _drive_pid(self) -> int:
        """PID of the drive, a child of its server; 0 if there is none yet."""
        with suppress(OSError, ValueError):
            return int(pid_path(self._served).read_text())
        return 0

    def _last_log_line(self) -> str:
        said = self._log.read_text(errors="replace").strip().splitlines() or ["its server exited without a message"]
        return said[-1].removeprefix("vcsd: ")

    def _update_row(self, **changes: Any) -> None:
        self._member = replace(self._member, **changes)
        self._publish(self._member)


def listen_host(node_ip: str, is_local: bool) -> str:
    """Address at which a node's drives listen: this machine's loopback for a local fleet."""
    return "127.0.0.1" if is_local or is_loopback(node_ip) else node_ip
