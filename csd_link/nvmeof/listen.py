"""Where drives listen for NVMe/TCP hosts, as a value, and what each is called there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from csd_link.nvmeof.subsystem import Record
from csd_link.nvmeof.target import is_loopback
from csd_link.nvmeof.tls import Credentials

MAX_PORT = 65535
_NQN = "nqn.2026-11.dev.vcsd:"


def nqn_of(name: str) -> str:
    """The NVMe qualified name of a drive."""
    return f"{_NQN}{name}"


class AllowedHost(NamedTuple):
    """A host that may connect, by its NQN, and the tenant that it is; an empty name is a drive's first tenant."""

    nqn: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Listen:
    """An address, and the drives of a server that listen from its port on, one each.

    host: name or address of the interface.
    port: of the first drive; 0 is any free port for each drive.
    drives: names in the order of ports.
    hosts: those that may connect; None is any, each as the drive's first tenant.
    tls: certificate and key of the drives, if connections must have TLS; with a CA, hosts need a certificate.
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
        """From HOST:PORT; raises ValueError for what is none, or for an address that other machines must not reach.

        is_remote_allowed: Whether other machines may reach it; then it takes a list of hosts, or TLS with a CA.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        last = int(port) + len(drives) - 1 if port.isascii() and port.isdigit() else -1
        if not host or not 0 < last - len(drives) + 1 <= last <= MAX_PORT:
            raise ValueError(f"listen = {text!r}: must be HOST:PORT, as 127.0.0.1:4420; each drive takes the next port")
        if not is_remote_allowed and not is_loopback(host):
            raise ValueError(
                f"listen = {text}: other machines reach this address, and hosts are not authenticated: take 127.0.0.1,"
                " or add --listen-remote"
            )
        if hosts is None and not (tls and tls.ca) and not is_loopback(host):
            raise ValueError(
                f"listen = {text}: other machines reach this address: add --hosts FILE, who may connect,"
                " or --tls-ca FILE, whose certificates hosts need"
            )
        return cls(host, int(port), drives, hosts, tls)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Listen:
        """What `dataclasses.asdict` has made, by way of JSON."""
        hosts = values["hosts"]
        allowed = None if hosts is None else tuple(AllowedHost(*each) for each in hosts)
        tls = values["tls"] and Credentials(**values["tls"])
        return cls(values["host"], values["port"], tuple(values["drives"]), allowed, tls)

    def port_of(self, drive: str) -> int:
        """Port of a drive; 0 is any."""
        return self.port and self.port + self.drives.index(drive)

    def tenant_of(self, host: str) -> str:
        """Tenant of a host that may connect, by the host's NQN; empty is a drive's first tenant."""
        return next((each.tenant for each in self.hosts or () if each.nqn == host), "")

    @property
    def records(self) -> tuple[Record, ...]:
        """What a discovery controller of any of the drives lists; nothing if their ports are not known before."""
        return tuple(Record(nqn_of(name), self.port_of(name)) for name in self.drives) if self.port else ()
