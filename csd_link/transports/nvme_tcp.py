"""Drives over NVMe/TCP: those that are served at an address, or drives of this run's own on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from csd_link.connect import Connect
from csd_link.driveset import DriveSet
from csd_link.host_end import Lost
from csd_link.nvmeof.commands import MAX_NQN_BYTES, Code
from csd_link.nvmeof.device import Endpoint, NvmeDevice
from csd_link.nvmeof.host import discover, host_nqn
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.listen import MAX_PORT, AllowedHost, Listen, nqn_of
from csd_link.nvmeof.target import DEFAULT_PORT
from csd_link.own_server import Placed, connected, own_drives
from csd_link.run_dir import port_path
from csd_link.served_drive import ServedDrive
from csd_link.transports.transport import DriveFactory, Transport, check_served
from csd_spec import Device

_LOOPBACK = "127.0.0.1"
_HOST_NQN = "hostnqn="


class NvmeTcp(Transport):
    """The drives that are served at an address; without one, drives of this run's own."""

    name, form = "nvme+tcp", "nvme+tcp, nvme+tcp://HOST:PORT or nvme+tcp://HOST:PORT/NQN"

    def check(self, where: str) -> None:
        if where:
            _parsed(where)

    def served(self, drives: DriveSet) -> Sequence[Connect]:
        if not drives.where:
            return ()
        host, port, nqn, own_nqn = _parsed(drives.where)
        check_served(drives, f"{host}:{port}")
        found = _discovered(host, port, own_nqn)
        first = next((number for number, each in enumerate(found) if each.nqn == nqn), None if nqn else 0)
        if first is None:
            raise Lost(f"no drive {nqn} at {host}:{port}: there are {', '.join(each.nqn for each in found)}")
        chosen = found[first : first + drives.count]
        if len(chosen) < drives.count:
            raise Lost(f"{len(chosen)} drives are served at {host}:{port} from {nqn or 'the first'} on: start more")
        return [partial(NvmeDevice, partial(_same, each), own_nqn) for each in chosen]

    def open(self, drives: DriveSet, factory: DriveFactory) -> AbstractContextManager[list[Device]]:
        connects = self.served(drives)
        if connects:
            return connected(connects)
        return own_drives(drives, factory.server, partial(_on_loopback, host_nqn()))


def _parsed(where: str) -> tuple[str, int, str, str]:
    """Host, port, NQN of the first drive and of this host, each empty if there is none; raises ValueError."""
    place, question, option = where.partition("?")
    own_nqn = option.removeprefix(_HOST_NQN)
    if question and (own_nqn == option or not 0 < len(own_nqn.encode()) <= MAX_NQN_BYTES):
        raise ValueError(f"transport = nvme+tcp:{where}: ?{option}: must be ?{_HOST_NQN}NQN")
    address, _, nqn = place.removeprefix("//").partition("/")
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = address, str(DEFAULT_PORT)
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT
    if not where.startswith("//") or not host or not is_port:
        raise ValueError(f"transport = nvme+tcp:{where}: needs an address, as nvme+tcp://127.0.0.1:{DEFAULT_PORT}")
    return host.removeprefix("[").removesuffix("]"), int(port), nqn, own_nqn


def _discovered(host: str, port: int, own_nqn: str) -> list[Endpoint]:
    try:
        return [Endpoint(host, each.port, each.nqn) for each in discover(host, port, own_nqn)]
    except (OSError, StatusError) as error:
        advice = f"serve one there first (vcsd serve --listen {host}:{port})"
        if isinstance(error, StatusError) and error.status == Code.INVALID_HOST:
            advice = f"it refuses this host: take a name that its --hosts lists ({_HOST_NQN}NQN behind a question mark)"
        raise Lost(f"no drive answers at {host}:{port} ({error}): {advice}") from error


def _same(endpoint: Endpoint) -> Endpoint:
    return endpoint


def _on_loopback(host: str, drive: ServedDrive, number: int, scratch: Path) -> Placed:
    """A drive at a free port of this machine, for one host alone."""
    listen = Listen(_LOOPBACK, 0, (drive.name,), (AllowedHost(host),))

    def locate() -> Endpoint:
        return Endpoint(_LOOPBACK, int(port_path(drive.name).read_text()), nqn_of(drive.name))

    return Placed(replace(drive, listen=listen), partial(NvmeDevice, locate, host))
