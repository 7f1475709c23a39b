"""Controller: one host's view of a subsystem, through properties and admin commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from csd_link.nvmeof import identify
from csd_link.nvmeof.commands import ALL_NAMESPACES, Admin, Answer, Code, CommandError, Csi, Sqe, words
from csd_link.nvmeof.features import Feature, Features
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.subsystem import Address, NvmeNamespace, Subsystem

_CAP, _VS, _CC, _CSTS = 0x00, 0x08, 0x14, 0x1C
_READY_TIMEOUT = 20  # CAP.TO, in units of 500 ms
_ENABLE, _SHUTDOWN = 1 << 0, 3 << 14
_ALL_SETS = 6  # CC.CSS: the host uses all command sets
_READY, _FATAL, _SHUTDOWN_DONE = 1 << 0, 1 << 1, 2 << 2
_KEEP_ALIVE_GRACE = 2  # a controller is removed after this many keep-alive timeouts without a command
_SMART_EVENT, _SMART_WARNINGS = 1, 0x1F
_LOG_SMART = 0x02
_MAX_LOG_BYTES = 1 << 20  # per command; no log page is larger
_INFORMATION = {0: 0x02, 1: 0x01}  # by bit of the critical warning: spare, temperature; others: reliability, 0

CompleteEvent = Callable[[int, int, int], None]  # cid, result, status


class Controller:
    """One association of a host with a subsystem. Admin commands come from one thread."""

    def __init__(self, subsystem: Subsystem, cntlid: int, host: tuple[bytes, str], limits: Limits) -> None:
        """Create a controller.

        Args:
            subsystem: Subsystem; without namespaces, it is a discovery subsystem.
            cntlid: Controller ID.
            host: Host identifier (16 bytes) and NQN.
            limits: Limits of the target.
        """
        self.subsystem, self.cntlid, self.host, self.limits = subsystem, cntlid, host, limits
        self.is_discovery = not subsystem.namespaces
        self.features = Features(limits.io_queues, host[0])
        self.queues: set[int] = set()
        self.lock = threading.Lock()  # guards queues
        self.address = Address("", 0, False)
        self.owner = host[1], ""  # with the host's address
        self.complete_event: CompleteEvent = lambda cid, result, status: None
        self._cc = self._csts = 0
        self._events: list[int] = []  # command IDs of outstanding Asynchronous Event Requests
        self._warned = 0
        self._heard = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether I/O and admin commands are accepted."""
        return bool(self._csts & _READY) and not self._cc & _SHUTDOWN

    @property
    def expired(self) -> bool:
        """Whether the host's keep-alive timeout has expired."""
        timeout_s = self.features.keep_alive_ms / 1000
        return bool(timeout_s) and time.monotonic() - self._heard > _KEEP_ALIVE_GRACE * timeout_s

    def get_property(self, offset: int, is_wide: bool) -> int:
        """Return the value of a property; raises CommandError."""
        entries = self.limits.queue_entries - 1
        sets = 1 << 37 | 1 << 43  # CAP.CSS: NVM, and all others (CC.CSS = 110b)
        properties = {
            _CAP: entries | 1 << 16 | _READY_TIMEOUT << 24 | sets,
            _VS: identify.VERSION,
            _CC: self._cc,
            _CSTS: self._csts,
        }
        if offset not in properties or is_wide != (offset == _CAP):
            raise CommandError(Code.INVALID_FIELD)
        return properties[offset]

    def set_property(self, offset: int, value: int) -> None:
        """Set CC, the only writable property; raises CommandError."""
        if offset != _CC or value >> 32:
            raise CommandError(Code.INVALID_FIELD)
        selected = value >> 4 & 7
        if value & _ENABLE and selected not in (0, _ALL_SETS):
            raise CommandError(Code.INVALID_FIELD)
        self._cc = value
        self._csts = (_READY if value & _ENABLE else 0) | (_SHUTDOWN_DONE if value & _SHUTDOWN else 0)
        if not value & _ENABLE:
            self._events.clear()

    def namespace(self, nsid: int) -> NvmeNamespace:
        """Return an existing namespace; raises CommandError."""
        namespace = self.subsystem.namespaces.get(nsid)
        if namespace is None:
            raise CommandError(Code.INVALID_NAMESPACE)
        return namespace

    def admin(self, sqe: Sqe) -> Answer | None:
        """Execute an admin command; None if its completion is deferred. Raises CommandError."""
        if not self.is_ready:
            raise CommandError(Code.SEQUENCE_ERROR)
        match sqe.opcode:
            case Admin.IDENTIFY:
                return Answer((self._identify(sqe),))
            case Admin.GET_LOG_PAGE:
                return Answer((self._log(sqe),))
            case Admin.GET_FEATURES:
                return self.features.get(sqe)
            case Admin.SET_FEATURES:
                return self.features.set(sqe)
            case Admin.KEEP_ALIVE:
                self._heard = time.monotonic()
                self._report_health()
                return Answer()
            case Admin.ASYNC_EVENT:
                self._hold(sqe)
                return None
            case Admin.ABORT if not self.is_discovery:
                return self._abort(sqe)
        raise CommandError(Code.INVALID_OPCODE)

    def _identify(self, sqe: Sqe) -> bytes:
        kind, csi, namespaces = sqe.cdw10 & 0xFF, sqe.cdw11 >> 24, self.subsystem.namespaces
        after = (number for number in sorted(namespaces) if number > sqe.nsid)
        match kind:
            case 0x01:
                return identify.controller(self.subsystem, self.cntlid, self.is_discovery, self.limits)
            case _ if self.is_discovery:
                raise CommandError(Code.INVALID_FIELD)
            case 0x00 | 0x05:
                return self._identify_namespace(sqe.nsid, Csi.NVM if kind == 0x00 else csi)
            case 0x02 | 0x10:
                return identify.namespace_list(after)
            case 0x03:
                return identify.descriptors(self.namespace(sqe.nsid))
            case 0x06 if csi in self._sets():
                return bytes(identify.PAGE_BYTES)
            case 0x07 | 0x1A if csi in self._sets():
                return identify.namespace_list(number for number in after if namespaces[number].csi == csi)
            case 0x08:
                return identify.independent(self.namespace(sqe.nsid))
            case 0x1C:
                return identify.command_sets(self._sets())
        raise CommandError(Code.INVALID_FIELD)

    def _identify_namespace(self, nsid: int, csi: int) -> bytes:
        """Identify a namespace; for the broadcast NSID, the common properties of the command set."""
        numbers = self.subsystem.with_set(csi)
        if nsid == ALL_NAMESPACES and numbers:
            nsid = numbers[0]
        if self.namespace(nsid).csi != csi:
            raise CommandError(Code.INVALID_FIELD)
        return self.namespace(nsid).identify(self.host[1]).ljust(identify.PAGE_BYTES, b"\0")

    def _sets(self) -> set[int]:
        return {namespace.csi for namespace in self.subsystem.namespaces.values()}

    def _log(self, sqe: Sqe) -> bytes:
        """Return the requested part of a log page."""
        size = 4 * (sqe.cdw10 >> 16 | (sqe.cdw11 & 0xFFFF) << 16) + 4
        offset, csi = words(sqe.cdw12, sqe.cdw13), sqe.cdw14 >> 24
        pages = self._pages(csi)
        read_page = pages.get(sqe.cdw10 & 0xFF)
        if read_page is None:
            raise CommandError(Code.INVALID_LOG_PAGE)
        page = read_page()
        if offset % 4 or offset > len(page) or size > _MAX_LOG_BYTES:
            raise CommandError(Code.INVALID_FIELD)
        return page[offset : offset + size].ljust(size, b"\0")

    def _pages(self, csi: int) -> dict[int, Callable[[], bytes]]:
        subsystem = self.subsystem
        if self.is_discovery:
            pages = {0x70: lambda: identify.discovery_log(subsystem, self.address)}
        else:
            numbers = subsystem.with_set(csi)
            io_effects = subsystem.namespaces[numbers[0]].effects if numbers else {}
            pages = {
                0x01: lambda: identify.error_log(subsystem),
                _LOG_SMART: lambda: identify.smart_log(subsystem),
                0x03: lambda: identify.firmware_log(subsystem),
                0x04: lambda: identify.namespace_list(()),  # changed namespaces: a drive's namespaces do not change
                0x05: lambda: identify.effects_log(io_effects, is_discovery=False),
                0x12: lambda: identify.features_log(Feature),
                0x13: lambda: bytes(identify.PAGE_BYTES),  # commands of a management endpoint, of which there is none
            }
        return pages | {0x00: lambda: identify.supported_logs((0x00, *pages))}

    def _hold(self, sqe: Sqe) -> None:
        """Keep an Asynchronous Event Request until an event occurs."""
        if len(self._events) >= identify.MAX_EVENTS:
            raise CommandError(Code.EVENT_LIMIT)
        self._events.append(sqe.cid)
        self._report_health()

    def _report_health(self) -> None:
        """Complete an event request for new critical warnings that the host has enabled."""
        if self.is_discovery or not self._events:
            return
        warning = self.subsystem.smart().critical_warning
        news = warning & ~self._warned & self.features.events & _SMART_WARNINGS
        self._warned = warning
        if news:
            bit = (news & -news).bit_length() - 1
            result = _SMART_EVENT | _INFORMATION.get(bit, 0) << 8 | _LOG_SMART << 16
            self.complete_event(self._events.pop(0), result, Code.SUCCESS)

    def _abort(self, sqe: Sqe) -> Answer:
        """Commands are executed in order, so only an event request can be outstanding when an Abort is executed."""
        queue, cid = sqe.cdw10 & 0xFFFF, sqe.cdw10 >> 16
        if queue or cid not in self._events:
            return Answer(result=1)
        self._events.remove(cid)
        self.complete_event(cid, 0, Code.ABORTED)
        return Answer()
