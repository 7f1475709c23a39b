"""Identify pages and log pages as bytes (NVMe Base Specification 2.0, sections 5.17 and 5.16)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from csd_link.nvmeof.commands import DISCOVERY_NQN, Admin
from csd_link.nvmeof.subsystem import ERROR_ENTRIES, SUPPORTED, Address, NvmeNamespace, Subsystem

PAGE_BYTES = 4096
VERSION = 0x20000
KEEP_ALIVE_UNIT = 10  # in units of 100 ms
MAX_EVENTS = 4
MDTS_UNIT_BYTES = 4096
_TEMPERATURE_K = 298  # assumed: an emulated drive has no thermometer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a target.

    A host is a host NQN at an address. One that holds less than its equal share of the controllers or connections takes
    one from the host that holds most.

    Attributes:
        connections: TCP connections.
        unnamed_connections: Connections whose host is not known yet, of `connections`.
        host_connections: Connections of a host.
        controllers: Controllers of all hosts.
        host_controllers: Controllers of a host.
        io_queues: I/O queues per controller.
        queue_entries: Entries per queue.
        in_capsule_bytes: In-capsule data of a command on an I/O queue.
        transfer_bytes: Data of a command, a power of two of at least 4 KiB.
        in_flight_bytes: Total data of commands that do not use in-capsule data. The first such command of a host is
            admitted in any case.
        host_in_flight_bytes: Such data of a host.
        handshake_s: Time from a connection until its Connect command.
        pdu_s: Time for one PDU, see `PduStream`.
    """

    connections: int = 256
    unnamed_connections: int = 64
    host_connections: int = 64
    controllers: int = 64
    host_controllers: int = 16
    io_queues: int = 8
    queue_entries: int = 128
    in_capsule_bytes: int = 1 << 20
    transfer_bytes: int = 1 << 26
    in_flight_bytes: int = 1 << 28
    host_in_flight_bytes: int = 1 << 26
    handshake_s: float = 10.0
    pdu_s: float = 10.0

    def __post_init__(self) -> None:
        assert self.unnamed_connections < self.connections, "no connection is left for known hosts"


def _text(page: bytearray, at: int, size: int, text: str) -> None:
    page[at : at + size] = text.encode("ascii", "replace")[:size].ljust(size)


def controller(subsystem: Subsystem, cntlid: int, is_discovery: bool, limits: Limits) -> bytes:
    """Identify Controller (figure 275)."""
    page = bytearray(PAGE_BYTES)
    _text(page, 4, 20, subsystem.serial)
    _text(page, 24, 40, subsystem.model)
    _text(page, 64, 8, subsystem.firmware)
    page[76] = 1 << 1  # CMIC: the subsystem may have several controllers
    page[77] = (limits.transfer_bytes // MDTS_UNIT_BYTES).bit_length() - 1  # MDTS
    struct.pack_into("<HI", page, 78, cntlid, VERSION)
    struct.pack_into("<I", page, 92, 0 if is_discovery else 1 << 8)  # OAES: namespace attribute notices
    page[111] = 2 if is_discovery else 1  # CNTRLTYPE
    page[258] = 3  # ACL
    page[259] = MAX_EVENTS - 1  # AERL
    page[260] = 1 << 0 | 1 << 1  # FRMW: one read-only slot
    page[261] = 1 << 1 | 1 << 2 | 1 << 5  # LPA: effects, extended data, supported log pages
    page[262] = ERROR_ENTRIES - 1  # ELPE
    struct.pack_into("<HH", page, 266, 343, 353)  # WCTEMP, CCTEMP in K, never reached
    page[280:296] = subsystem.capacity_bytes.to_bytes(16, "little")  # TNVMCAP
    struct.pack_into("<H", page, 320, KEEP_ALIVE_UNIT)
    page[512], page[513] = 0x66, 0x44  # SQES, CQES
    struct.pack_into("<H", page, 514, limits.queue_entries)  # MAXCMD
    struct.pack_into("<I", page, 516, 0 if is_discovery else max(subsystem.namespaces, default=0))
    struct.pack_into("<H", page, 520, 1 << 0 | 1 << 2 | 1 << 3 | 1 << 7)  # ONCS: Compare, DSM, Write Zeroes, Verify
    page[525] = 1 << 0 | 3 << 1  # VWC: present; Flush supports the broadcast NSID
    # SGLS: any length; a list may be longer than the data; an address may be an offset
    struct.pack_into("<I", page, 536, 1 << 0 | 1 << 18 | 1 << 20)
    nqn = (DISCOVERY_NQN if is_discovery else subsystem.nqn).encode()
    page[768 : 768 + len(nqn)] = nqn
    in_capsule = 0 if is_discovery else limits.in_capsule_bytes
    struct.pack_into("<II", page, 1792, (64 + in_capsule) // 16, 1)  # IOCCSZ, IORCSZ
    page[1803] = 1  # MSDBD
    return bytes(page)


def namespace_list(numbers: Iterable[int]) -> bytes:
    """List of namespace IDs."""
    nsids = list(numbers)[: PAGE_BYTES // 4]
    return struct.pack(f"<{len(nsids)}I", *nsids).ljust(PAGE_BYTES, b"\0")


def descriptors(namespace: NvmeNamespace) -> bytes:
    """Namespace Identification Descriptors: UUID and command set."""
    uuid = struct.pack("<BBH16s", 3, 16, 0, namespace.uuid)
    return (uuid + struct.pack("<BBHB", 4, 1, 0, namespace.csi)).ljust(PAGE_BYTES, b"\0")


def independent(namespace: NvmeNamespace) -> bytes:
    """Identify Namespace, independent of its command set (CNS 08h)."""
    page = bytearray(PAGE_BYTES)
    page[1] = 1 << 0  # NMIC: several controllers may attach it
    page[14] = 1  # NSTAT: ready
    return bytes(page)


def command_sets(sets: Iterable[int]) -> bytes:
    """The only supported combination of command sets (CNS 1Ch)."""
    return sum(1 << csi for csi in set(sets)).to_bytes(8, "little").ljust(PAGE_BYTES, b"\0")


def smart_log(subsystem: Subsystem) -> bytes:
    """SMART / health information (figure 207). The entries of the error log are those of the subsystem's own."""
    page, smart = bytearray(512), subsystem.smart()
    struct.pack_into(
        "<BHBBB",
        page,
        0,
        smart.critical_warning,
        _TEMPERATURE_K,
        smart.avail_spare,
        smart.spare_thresh,
        min(smart.percent_used, 255),
    )
    counts = (
        (32, smart.data_units_read),
        (48, smart.data_units_written),
        (64, smart.host_read_commands),
        (80, smart.host_write_commands),
        (96, smart.controller_busy_time),
        (112, smart.power_cycles),
        (144, smart.unsafe_shutdowns),
        (160, smart.media_errors),
        (176, subsystem.error_count),
    )
    for at, value in counts:
        page[at : at + 16] = int(value).to_bytes(16, "little")
    return bytes(page)


def error_log(subsystem: Subsystem) -> bytes:
    """Error Information, most recent error first (figure 206)."""
    entries = [
        struct.pack("<QHHHHQI36x", error.number, error.sq_id, error.cid, error.status << 1, 0xFFFF, 0, error.nsid)
        for error in list(subsystem.errors)
    ]
    return b"".join(entries).ljust(64 * ERROR_ENTRIES, b"\0")


def firmware_log(subsystem: Subsystem) -> bytes:
    """Firmware slot information: slot 1 is active."""
    page = bytearray(512)
    page[0] = 1
    _text(page, 8, 8, subsystem.firmware)
    return bytes(page)


def features_log(features: Iterable[int]) -> bytes:
    """Feature Identifiers Supported and Effects (log page 12h)."""
    page = bytearray(PAGE_BYTES)
    for feature in features:
        struct.pack_into("<I", page, 4 * feature, SUPPORTED)
    return bytes(page)


def effects_log(io_effects: Mapping[int, int], is_discovery: bool) -> bytes:
    """Commands supported and effects (figure 211)."""
    admin = [Admin.GET_LOG_PAGE, Admin.IDENTIFY, Admin.KEEP_ALIVE, Admin.SET_FEATURES, Admin.GET_FEATURES]
    admin += [Admin.ASYNC_EVENT] if is_discovery else [Admin.ASYNC_EVENT, Admin.ABORT]
    page = bytearray(PAGE_BYTES)
    for command in admin:
        struct.pack_into("<I", page, 4 * command, SUPPORTED)
    for opcode, effect in io_effects.items():
        struct.pack_into("<I", page, 1024 + 4 * opcode, effect)
    return bytes(page)


def supported_logs(identifiers: Iterable[int]) -> bytes:
    """Supported log pages (log page 00h)."""
    page = bytearray(1024)
    for identifier in identifiers:
        struct.pack_into("<I", page, 4 * identifier, SUPPORTED)
    return bytes(page)


def discovery_log(subsystem: Subsystem, at: Address) -> bytes:
    """Discovery log page (figure 285): NVM subsystems at the address that the host has connected to."""
    entries = []
    for port_id, record in enumerate(subsystem.discovers, 1):
        entry = bytearray(1024)
        secured = 1 if subsystem.needs_tls else 2  # TREQ: a secure channel is required, or not
        struct.pack_into("<BBBBHHH", entry, 0, 3, 2 if at.is_ipv6 else 1, 2, secured | 1 << 2, port_id, 0xFFFF, 32)
        entry[768] = 2 if subsystem.needs_tls else 0  # SECTYPE: TLS 1.3
        _text(entry, 32, 32, str(record.port))
        nqn = record.nqn.encode()
        entry[256 : 256 + len(nqn)] = nqn
        _text(entry, 512, 256, at.host)
        entries.append(bytes(entry))
    return struct.pack("<QQH", 1, len(entries), 0).ljust(1024, b"\0") + b"".join(entries)
