"""Host (initiator): an association with a controller, with an admin queue and an I/O queue."""

from __future__ import annotations

import os
import struct
import uuid
from contextlib import ExitStack

from csd_link.nvmeof.commands import DISCOVERY_NQN, Admin, Fabrics, Sqe
from csd_link.nvmeof.controllers import ConnectData
from csd_link.nvmeof.host_queue import HostQueue
from csd_link.nvmeof.pdu import Buffer, Digests
from csd_link.nvmeof.subsystem import DiscoveryRecord
from csd_link.nvmeof.tls import Credentials

ENTRIES = 32  # per queue
_HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:"
_CC = 0x14
_CC_ENABLED = 1 << 0 | 6 << 4 | 6 << 16 | 4 << 20  # all command sets; entries of 64 and 16 bytes
_ANY = 0xFFFF
_PAGE_BYTES, _ENTRY_BYTES = 4096, 1024
_DISCOVERY_LOG = 0x70


def host_nqn() -> str:
    """Generate a random host NQN."""
    return f"{_HOST_NQN}{uuid.uuid4()}"


class NvmeHost:
    """One association: its admin queue and, unless the subsystem is for discovery, an I/O queue."""

    def __init__(
        self,
        host: str,
        port: int,
        nqn: str,
        name: str = "",
        digests: Digests = Digests(),
        keep_alive_ms: int = 0,
        tls: Credentials | None = None,
    ) -> None:
        """Connect, enable the controller and connect the I/O queue.

        Args:
            nqn: NQN of the subsystem.
            name: NQN of the host; empty generates one.
            tls: See `HostQueue`.

        Raises:
            OSError: No controller answers.
            StatusError: The controller rejects the host.
        """
        self.name = name or host_nqn()
        data = ConnectData(os.urandom(16), _ANY, nqn, self.name)
        with ExitStack() as undo:
            self.admin = HostQueue(host, port, digests, tls)
            undo.callback(self.admin.close)
            cntlid = self.admin.connect(data, 0, ENTRIES, keep_alive_ms)
            self.set_property(_CC, _CC_ENABLED)
            self.controller = bytes(self.identify(1))
            if nqn != DISCOVERY_NQN:
                self.io = HostQueue(host, port, digests, tls)
                undo.callback(self.io.close)
                self.io.connect(ConnectData(data.host_id, cntlid, nqn, data.hostnqn), 1, ENTRIES)
                self.io.in_capsule_bytes = struct.unpack_from("<I", self.controller, 1792)[0] * 16 - 64
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Disconnect."""
        self._undo.close()

    def get_property(self, offset: int, is_wide: bool = False) -> int:
        """Return the value of a property."""
        return self.admin.command(
            Sqe(Admin.FABRICS, nsid=Fabrics.PROPERTY_GET, cdw10=int(is_wide), cdw11=offset)
        ).result

    def set_property(self, offset: int, value: int) -> None:
        """Set a 32-bit property."""
        self.admin.command(Sqe(Admin.FABRICS, nsid=Fabrics.PROPERTY_SET, cdw11=offset, cdw12=value))

    def identify(self, kind: int, nsid: int = 0, csi: int = 0) -> Buffer:
        """Return an Identify page of 4096 bytes; `kind` is CNS."""
        sqe = Sqe(Admin.IDENTIFY, nsid=nsid, cdw10=kind, cdw11=csi << 24)
        return self.admin.command(sqe, (), _PAGE_BYTES).data

    def log_page(self, page: int, size: int, offset: int = 0, csi: int = 0) -> Buffer:
        """Return a part of a log page; size and offset are multiples of 4 bytes."""
        dwords = size // 4 - 1
        sqe = Sqe(
            Admin.GET_LOG_PAGE,
            cdw10=page | (dwords & 0xFFFF) << 16,
            cdw11=dwords >> 16,
            cdw12=offset & 0xFFFFFFFF,
            cdw13=offset >> 32,
            cdw14=csi << 24,
        )
        return self.admin.command(sqe, (), size).data


def discover(host: str, port: int, name: str = "", tls: Credentials | None = None) -> list[DiscoveryRecord]:
    """List the subsystems of a discovery controller; raises OSError, StatusError."""
    controller = NvmeHost(host, port, DISCOVERY_NQN, name, tls=tls)
    try:
        _, count = struct.unpack_from("<QQ", controller.log_page(_DISCOVERY_LOG, _ENTRY_BYTES))
        records = []
        for number in range(min(count, _PAGE_BYTES)):
            entry = controller.log_page(_DISCOVERY_LOG, _ENTRY_BYTES, (number + 1) * _ENTRY_BYTES)
            nqn = bytes(entry[256:512]).rstrip(b"\0").decode("utf-8", "replace")
            records.append(DiscoveryRecord(nqn, int(bytes(entry[32:64]).strip(b" \0") or b"0")))
        return records
    finally:
        controller.close()
