"""NVMe/TCP listening configuration of drives, and their NQNs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from csd_link.nvmeof.subsystem import DiscoveryRecord
from csd_link.nvmeof.target import is_loopback
from csd_link.nvmeof.tls import Credentials

MAX_PORT = 65535
_NQN = "nqn.2026-11.dev.vcsd:"


def nqn_of(name: str) -> str:
    """The NVMe qualified name of a drive."""
    return f"{_NQN}{name}"


class AllowedHost(NamedTuple):
    """A host that may connect, by its NQN, and its tenant; an empty name is a drive's first tenant."""

    nqn: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Listen:
    """An address at which drives of a server listen, one port per drive.

    Attributes:
        host: Name or address of the interface.
        port: Port of the first drive; 0 uses any free port for each drive.
        drives: Names, in the order of ports.
        hosts: Hosts that may connect; None allows any, each as the drive's first tenant.
        tls: Certificate and key of the drives, if TLS is required; with a CA, hosts need a certificate.
    """

    host: str
    port: int
    drives: tuple[str, ...]
    hosts: tuple[AllowedHost, ...] | None = None
    tls: Credentials | None = None

    @classmethod
    def parse(
        cls,
        text: str,
        drives: tuple[str, ...],
        is_remote_allowed: bool,
        hosts: tuple[AllowedHost, ...] | None = None,
        tls: Credentials | None = None,
    ) -> Listen:
        """Parse HOST:PORT.

        Args:
            is_remote_allowed: Whether other machines may reach it, which then needs a list of hosts, or TLS with a CA.

        Raises:
            ValueError: The text is invalid, or other machines could reach the address without authentication.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        last = int(port) + len(drives) - 1 if port.isascii() and port.isdigit() else -1
        if not host or not 0 < last - len(drives) + 1 <= last <= MAX_PORT:
            raise ValueError(f"listen = {text!r}: must be HOST:PORT, as 127.0.0.1:4420; each drive takes the next port")
        if not is_remote_allowed and not is_loopback(host):
            raise ValueError(
                f"listen = {text}: other machines reach this address, and hosts are not authenticated: use 127.0.0.1,"
                " or add --listen-remote"
            )
        if hosts is None and not (tls and tls.ca) and not is_loopback(host):
            raise ValueError(
                f"listen = {text}: other machines reach this address: add --hosts-file FILE (allowed hosts)"
                " or --tls-ca FILE (CA of host certificates)"
            )
        return cls(host, int(port), drives, hosts, tls)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Listen:
        """Read the output of `dataclasses.asdict` after a JSON round trip."""
        hosts = values["hosts"]
        allowed = None if hosts is None else tuple(AllowedHost(*host) for host in hosts)
        tls = values["tls"] and Credentials(**values["tls"])
        return cls(values["host"], values["port"], tuple(values["drives"]), allowed, tls)

    def port_of(self, drive: str) -> int:
        """Port of a drive; 0 is any."""
        return self.port and self.port + self.drives.index(drive)

    def tenant_of(self, host: str) -> str:
        """Tenant of an allowed host by its NQN; empty is a drive's first tenant."""
        return next((entry.tenant for entry in self.hosts or () if entry.nqn == host), "")

    @property
    def records(self) -> tuple[DiscoveryRecord, ...]:
        """Entries of each drive's discovery log; empty if ports are not known in advance."""
        return tuple(DiscoveryRecord(nqn_of(name), self.port_of(name)) for name in self.drives) if self.port else ()
