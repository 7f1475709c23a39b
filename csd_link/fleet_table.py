"""Fleet table: drives of a fleet, their addresses, and the host NQN that they accept.

Ray's key-value store holds it. A separate process reads and writes it (`csd_link.fleet_kv`), since Ray's memory and
threads would otherwise stay in the host process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from csd_link.diagnosis import MissingDependency
from csd_link.host_end import DriveLostError
from csd_link.hosting import HostingOptions
from csd_link.liveness import is_running
from csd_link.nvmeof.device import Endpoint
from csd_link.run_dir import run_dir
from csd_spec.checked import frozen_value
from csd_spec.drive import DriveSpec
from csd_spec.optional import is_installed
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

READ_TIMEOUT_S = 20.0
HOW_TO_GET_RAY = "pip install 'vcsd[ray]'"
FLEET, DRIVE, DRAIN = "fleet", "drive/", "drain/"  # keys, and prefixes of per-drive keys
MAX_DRIVES = 1024

State = Literal["starting", "up", "draining", "lost"]


@frozen_value
class FleetPlan(HostingOptions):
    """A fleet to start.

    Attributes:
        drives: Number of drives that hosts use.
        spares: Number of further drives, for data of drives that are lost.
        spec: Description of each drive.
        flash: Folder for flash on each node's own disk; None is the run folder, in memory.
        cpus: CPUs that Ray reserves for each drive.
        address: Address of the Ray cluster; empty is `RAY_ADDRESS`, then a cluster on this machine.
    """

    drives: int
    spares: int = 0
    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH
    flash: Path | None = None
    cpus: float = 0.1
    address: str = ""

    @property
    def names(self) -> list[str]:
        """Names of drives, then of spares."""
        return [f"drive{number}" for number in range(self.drives)] + [f"spare{n}" for n in range(self.spares)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A drive of a fleet.

    Attributes:
        name: Its name, which stays when another node takes it over.
        generation: 1 for the first drive of that name, one more for each that begins with empty flash.
        state: Its state; lost if its node is gone or it cannot start.
        node: Ray's identifier of its node.
        host, port: Address for NVMe/TCP hosts.
        nqn: NQN of this generation.
        is_spare: Whether hosts use it only in place of a lost drive.
        restarts: Number of restarts of its process.
        since_s: Wall-clock time at which this generation was started, seconds since the epoch.
        pid: Process that serves it.
        reason: Reason of state lost.
    """

    name: str
    generation: int
    state: State
    node: str
    host: str
    port: int
    nqn: str
    is_spare: bool
    restarts: int = 0
    since_s: float = 0.0
    pid: int = 0
    reason: str = ""

    @property
    def endpoint(self) -> Endpoint:
        """Address for NVMe/TCP hosts."""
        return Endpoint(self.host, self.port, self.nqn)


@dataclass(frozen=True, slots=True)
class FleetTable:
    """Content of the table.

    Attributes:
        host_nqn: NQN of the only host that the drives accept.
    """

    fleet: str
    host_nqn: str
    members: tuple[Member, ...]

    def find(self, name_or_nqn: str) -> Member:
        """Return the drive with a name or NQN; raises ValueError if it is unknown."""
        for member in self.members:
            if name_or_nqn in (member.name, member.nqn):
                return member
        raise ValueError(f"no drive {name_or_nqn!r} in the fleet: there are {', '.join(m.name for m in self.members)}")

    def usable(self, spares: bool) -> list[Member]:
        """Return the drives (or spares) in state `up`."""
        return [member for member in self.members if member.is_spare is spares and member.state == "up"]


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """A Ray cluster: address of its GCS, or `auto`, and its authentication token."""

    address: str
    token: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Environment for a process that connects to it."""
        more = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} if self.token else {}
        return {**os.environ, **more}


def local_file() -> Path:
    """Private file with the address, the token and the process of this user's local fleet."""
    return run_dir() / "fleet.json"


def read_local() -> dict[str, Any] | None:
    """Return the content of the local fleet's file; None if there is no local fleet."""
    try:
        content: dict[str, Any] = json.loads(local_file().read_text())
    except FileNotFoundError:
        return None
    return content


def find_cluster(address: str = "") -> ClusterAddress:
    """Find a cluster: at the address, else the local fleet's, else that of `RAY_ADDRESS`, else one on this machine.

    Raises:
        DriveLostError: The local fleet's process has ended.
        ValueError: An address is not HOST:PORT.
    """
    if not address and (local := read_local()):
        if not is_running(local["pid"]):
            raise DriveLostError(
                "the process of the local fleet has exited, and its drives with it: vcsd fleet down removes it"
            )
        return ClusterAddress(local["address"], local["token"])
    gcs_address = (address or os.environ.get("RAY_ADDRESS") or "auto").removeprefix("//")
    host, _, port = gcs_address.rpartition(":")
    if gcs_address != "auto" and not (host and "/" not in host and port.isascii() and port.isdigit()):
        raise ValueError(f"Ray address {gcs_address!r}: must be HOST:PORT of the cluster's GCS, as 10.0.0.1:6379")
    return ClusterAddress(gcs_address)


def missing_ray() -> MissingDependency | None:
    """Return a finding if Ray is not installed, without importing it."""
    return None if is_installed("ray") else MissingDependency("Ray is not installed", HOW_TO_GET_RAY)


def read_table(cluster: ClusterAddress) -> FleetTable | None:
    """Read the table of a cluster's fleet; None if no fleet is up. Raises DriveLostError if the cluster is down."""
    return parse_table(json.loads(_run(cluster, [])))


def mark_draining(cluster: ClusterAddress, member: Member) -> None:
    """Mark a generation of a drive as draining; raises DriveLostError if the cluster does not answer."""
    _run(cluster, [f"{DRAIN}{member.name}", str(member.generation)])


def parse_table(store: dict[str, Any]) -> FleetTable | None:
    """Parse the store's content: keys with their texts, and identifiers of nodes that are alive."""
    keys, alive = store["keys"], set(store["nodes"])
    if FLEET not in keys:
        return None
    fleet = json.loads(keys[FLEET])
    members = []
    for name in fleet["names"]:
        row = keys.get(f"{DRIVE}{name}")
        member = Member(**json.loads(row)) if row else _unplaced(name)
        if row and member.node not in alive:
            member = replace(member, state="lost", reason="its node is gone")
        elif member.state == "up" and keys.get(f"{DRAIN}{name}") == str(member.generation):
            member = replace(member, state="draining")
        members.append(member)
    return FleetTable(fleet["id"], fleet["host_nqn"], tuple(members))


def _unplaced(name: str) -> Member:
    """Member for a drive without a node."""
    is_spare = name.startswith("spare")
    return Member(name=name, generation=0, state="starting", node="", host="", port=0, nqn="", is_spare=is_spare)


def _run(cluster: ClusterAddress, words: list[str]) -> str:
    """Run the process that accesses Ray's store; raises ValueError without Ray, DriveLostError if it fails."""
    if missing := missing_ray():
        raise ValueError(f"a fleet needs Ray: {missing.fix}")
    command = [sys.executable, "-m", "csd_link.fleet_kv", cluster.address, *words]
    try:
        done = subprocess.run(
            command, env=cluster.environment, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DriveLostError(
            f"the Ray cluster at {cluster.address} did not answer within {READ_TIMEOUT_S:g} s"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        if cluster.address == "auto":
            raise DriveLostError(
                f"no fleet is up on this machine: vcsd fleet up --local N starts one ({said[-1][:200]})"
            )
        raise DriveLostError(f"no Ray cluster answers at {cluster.address}: {said[-1][:200]}")
    return done.stdout
