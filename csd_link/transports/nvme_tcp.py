"""NVMe/TCP transport: drives served at an address, or private drives on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from csd_link.connect import Connect
from csd_link.driveset import DriveSetConfig
from csd_link.host_end import DriveLostError
from csd_link.nvmeof.commands import MAX_NQN_BYTES, Code
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.host import discover, host_nqn
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.listen import MAX_PORT, AllowedHost, Listen, nqn_of
from csd_link.nvmeof.target import DEFAULT_PORT
from csd_link.nvmeof.tls import Credentials, TlsError
from csd_link.private_server import ServerEndpoint, open_devices, own_drives
from csd_link.run_dir import port_path
from csd_link.served_drive import ServedDrive
from csd_link.transports.transport import DriveFactory, Transport, check_served
from csd_spec import Drive

_LOOPBACK = "127.0.0.1"
_OPTIONS = ("hostnqn", "ctrl_loss_tmo", "tls", "cert", "key")
_MAX_LOSS_S = 86400


@dataclass(frozen=True, slots=True)
class _Where:
    """Parsed address.

    Attributes:
        nqn: NQN of the first drive; empty for any.
        host_nqn: NQN of this host; empty for the default.
        ctrl_loss_s: Reconnect timeout, seconds; None uses that of the set of drives.
        tls: See `NvmeDrive`.
    """

    host: str
    port: int
    nqn: str
    host_nqn: str = ""
    ctrl_loss_s: float | None = None
    tls: Credentials | None = None


class NvmeTcp(Transport):
    """Drives served at an address; without an address, private drives of this run."""

    name, form = "nvme+tcp", "nvme+tcp, nvme+tcp://HOST:PORT or nvme+tcp://HOST:PORT/NQN?OPTION=VALUE"

    def check(self, where: str) -> None:
        if where:
            _parsed(where)

    def served(self, drives: DriveSetConfig) -> Sequence[Connect]:
        if not drives.where:
            return ()
        where = _parsed(drives.where)
        host, port, nqn = where.host, where.port, where.nqn
        check_served(drives, f"{host}:{port}")
        endpoints = _discovered(where)
        first = next((number for number, endpoint in enumerate(endpoints) if endpoint.nqn == nqn), None if nqn else 0)
        if first is None:
            raise DriveLostError(
                f"no drive {nqn} at {host}:{port}: there are {', '.join(endpoint.nqn for endpoint in endpoints)}"
            )
        chosen = endpoints[first : first + drives.total]
        if len(chosen) < drives.total:
            raise DriveLostError(
                f"{len(chosen)} drives are served at {host}:{port} from {nqn or 'the first'} on: start more"
            )
        loss_s = drives.ctrl_loss_s if where.ctrl_loss_s is None else where.ctrl_loss_s
        return [
            partial(NvmeDrive, partial(_same, endpoint), where.host_nqn, ctrl_loss_s=loss_s, tls=where.tls)
            for endpoint in chosen
        ]

    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
        connects = self.served(drives)
        if connects:
            return open_devices(connects, drives.recovery_s)
        return own_drives(drives, factory.server, partial(_on_loopback, host_nqn()))


def _parsed(where: str) -> _Where:
    """Parse an address; raises ValueError if it or an option is invalid."""
    place, question, text = where.partition("?")
    address, _, nqn = place.removeprefix("//").partition("/")
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = address, str(DEFAULT_PORT)
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT
    if not where.startswith("//") or not host or not is_port:
        raise ValueError(f"transport = nvme+tcp:{where}: needs an address, as nvme+tcp://127.0.0.1:{DEFAULT_PORT}")
    try:
        options = _options(text) if question else {}
    except (ValueError, TlsError) as error:
        raise ValueError(f"transport = nvme+tcp:{where}: {error}") from error
    return _Where(host.removeprefix("[").removesuffix("]"), int(port), nqn, **options)


def _options(text: str) -> dict[str, Any]:
    """Parse OPTION=VALUE&OPTION=VALUE to fields of `_Where`; raises ValueError."""
    values = dict[str, str]()
    for pair in text.split("&"):
        name, _, value = pair.partition("=")
        if name not in _OPTIONS or name in values or not value:
            raise ValueError(f"?{pair}: must be one of {', '.join(_OPTIONS)}, each once and with =VALUE")
        values[name] = value
    options = dict[str, Any]()
    if nqn := values.get("hostnqn"):
        if len(nqn.encode()) > MAX_NQN_BYTES:
            raise ValueError(f"hostnqn={nqn}: at most {MAX_NQN_BYTES} bytes")
        options["host_nqn"] = nqn
    if seconds := values.get("ctrl_loss_tmo"):
        if not (seconds.isascii() and seconds.isdigit() and int(seconds) <= _MAX_LOSS_S):
            raise ValueError(f"ctrl_loss_tmo={seconds}: must be whole seconds, 0 to {_MAX_LOSS_S}")
        options["ctrl_loss_s"] = float(seconds)
    if "tls" in values:
        options["tls"] = Credentials(values.get("cert", ""), values.get("key", ""), values["tls"])
        options["tls"].client()
    elif "cert" in values or "key" in values:
        raise ValueError("cert= and key= have no effect without tls=FILE, the CA of the drives")
    if "key" in values and "cert" not in values:
        raise ValueError("key= has no effect without cert=FILE, this host's certificate")
    return options


def _discovered(where: _Where) -> list[Endpoint]:
    host, port = where.host, where.port
    try:
        return [Endpoint(host, record.port, record.nqn) for record in discover(host, port, where.host_nqn, where.tls)]
    except (OSError, StatusError) as error:
        advice = f"serve one there first (vcsd drive serve --listen {host}:{port})"
        if isinstance(error, StatusError) and error.status == Code.INVALID_HOST:
            advice = (
                "it refuses this host: take a name that its --hosts-file lists (?hostnqn=NQN at the end of the address)"
            )
        if isinstance(error, TlsError):
            raise DriveLostError(f"no drive at {error}") from error
        raise DriveLostError(f"no drive answers at {host}:{port} ({error}): {advice}") from error


def _same(endpoint: Endpoint) -> Endpoint:
    return endpoint


def _on_loopback(host: str, drive: ServedDrive, number: int, scratch: Path) -> ServerEndpoint:
    """Configure a drive to listen at a free loopback port for a single host."""
    listen = Listen(_LOOPBACK, 0, (drive.name,), (AllowedHost(host),))

    def locate() -> Endpoint:
        return Endpoint(_LOOPBACK, int(port_path(drive.name).read_text()), nqn_of(drive.name))

    return ServerEndpoint(replace(drive, listen=listen), partial(NvmeDrive, locate, host))
