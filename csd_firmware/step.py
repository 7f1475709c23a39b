"""Firmware of a drive: checks a command, carries it out and completes it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from attention_engine import METHODS, Methods
from csd_firmware.attend import planned_run
from csd_firmware.check import NO_LIMIT, InvalidFieldError, check, check_time, seqs_of, with_plain_integers
from csd_firmware.handlers import HANDLERS, Run
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.link import LinkUse
from csd_firmware.objects import unnamed_sequences
from csd_firmware.quotas import check_quota
from csd_firmware.state import DriveState
from csd_firmware.trace import DriveTrace
from csd_spec import Attend, Command, Completion, DriveSpec, Status
from csd_spec.verbs import (
    ENTRY_BYTES,
    VERBS,
    CommandSpec,
    CreatesSequences,
    ForksSequences,
    FreesUnnamed,
    MakesDurable,
    NamesPrefixes,
)
from ftl import (
    FtlError,
    Listener,
    MediaFailedError,
    Nand,
    OutOfSpaceError,
    ReadOnlyError,
    UncorrectableReadError,
    UnknownSequenceError,
)

STATUS_OF = (
    (InvalidFieldError, Status.INVALID_FIELD),
    (UnknownSequenceError, Status.UNKNOWN_SEQUENCE),
    (OutOfSpaceError, Status.CAPACITY_EXCEEDED),
    (ReadOnlyError, Status.READ_ONLY),
    (MediaFailedError, Status.WRITE_FAULT),
    (UncorrectableReadError, Status.UNRECOVERED_READ_ERROR),
    (FtlError, Status.INTERNAL_ERROR),
)


def status_of(error: InvalidFieldError | FtlError) -> Status:
    """NVMe status for an error."""
    return next(status for kind, status in STATUS_OF if isinstance(error, kind))


_FAILED = "the drive has failed and only reads now"
_NO_MEMORY = "this machine has no memory left for the command: nothing has changed, repeat it later"


class Firmware:
    """Firmware of one drive. Commands are carried out one after the other, in order.

    A drive has one simulated clock, one flash and one link, which its commands, blocks and values share. In simulated
    time, requests that do not need the engine overlap with others; all take turns on each direction of the link.

    An unexpected exception *fails* the drive: tables in DRAM may be inconsistent, so nothing is written from then on,
    and flash stays as of the last flush. Reads and logs continue, except for sequences that the failing command was
    changing. Only a lack of memory does not where nothing can have changed: while any command is checked, and in a
    command that changes nothing, before it reads flash (with pages in files: only while it is checked).

    Attributes:
        free_ns: Simulated time at which the engine is free, ns.
        now_ns: The drive's clock: the end of the latest request, ns. A request whose host has no simulated time is
            submitted then.
        methods: Attention methods by name.
        trace: Records when resources are busy, which takes time for every page; None: nothing is recorded.
        failure: Traceback of the exception that failed the drive; empty if the drive works, or if its disk failed.
        on_failure: Called once when the drive fails; may be None.
        remedy: Advice to the owner of a failed drive, for error messages.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None = None, methods: Methods = METHODS, threads: int = 1) -> None:
        self.state = DriveState(spec, nand, methods, threads)
        self.spec, self.ftl, self.methods = spec, self.state.ftl, self.state.methods
        self.free_ns = self.now_ns = 0
        self._link = {"in": LinkUse(), "out": LinkUse()}
        self._half_changed: frozenset[int] = frozenset()  # sequences that the failing command was changing
        self.trace: DriveTrace | None = None
        self.failure = ""
        self.on_failure: Callable[[], None] | None = None
        is_persistent = self.ftl.nand.name != "memory"
        self.remedy = (
            "open its folder again" if is_persistent else "read what is still needed, then create another drive"
        )

    def step(self, command: Command, submit_ns: int, tenant: int = 0, max_bytes: int = NO_LIMIT) -> Completion:
        """Check and carry out a command; returns its completion with times and breakdown.

        A completion also waits for its programs, but the engine is free for the next command meanwhile.

        Args:
            tenant: Label of sequences that the command creates.
            max_bytes: Limit on the completion's data; commands that would exceed it are rejected.
        """
        name = type(command).__name__
        if isinstance(submit_ns, np.integer):
            submit_ns = int(submit_ns)
        try:
            return self._traced(command, submit_ns, tenant, max_bytes)
        except (InvalidFieldError, FtlError) as error:
            return self.refuse(name, status_of(error), str(error), submit_ns)
        except BaseException as error:
            self.fail(name, error, command)
            if not isinstance(error, Exception):
                raise
            return self.refuse(name, Status.INTERNAL_ERROR, self.ftl.nand.failed, submit_ns)

    def _traced(self, command: Command, submit_ns: int, tenant: int, max_bytes: int) -> Completion:
        if self.trace is None:
            return self._execute(command, LatencyBreakdown(submit_ns), tenant, max_bytes)
        timing = self.ftl.timing
        with self.trace.command(command) as trace:
            timing.tracer = trace.flash.append
            try:
                trace.completion = self._execute(command, LatencyBreakdown(submit_ns, trace), tenant, max_bytes)
            finally:
                timing.tracer = None
        return trace.completion

    def _execute(self, command: Command, watch: LatencyBreakdown, tenant: int, max_bytes: int) -> Completion:
        check_time(watch.start_ns)
        self.state.tenant = tenant
        if self.ftl.nand.failed:
            self._check_failed(command)
        try:
            command = with_plain_integers(command)
            verb, run = self.check(command, tenant, max_bytes)
        except MemoryError as error:
            raise FtlError(_NO_MEMORY) from error
        nbytes, pages_read = verb.bytes_in(command), self.ftl.counters.read
        link = self.spec.link
        watch.until("link", self._link["in"].end_ns(watch.now_ns, link.transfer_ns(nbytes)) + link.command_ns)
        if not verb.overlaps:
            watch.until("queue", self.free_ns)
        try:
            done = run(self.state, command, watch)
        except MemoryError as error:
            if verb.effect or self.ftl.counters.read != pages_read or self.ftl.nand.page_store.lazy:
                raise  # something may be half changed
            raise FtlError(_NO_MEMORY) from error
        if not verb.overlaps:
            assert watch.now_ns >= self.free_ns, f"{verb.name} ended before it began"
            self.free_ns = watch.now_ns
        if isinstance(verb.effect, CreatesSequences | ForksSequences):
            self.ftl.label(done.data[0].tolist(), tenant)
        return self._complete(verb, nbytes, done, watch)

    def fail(self, what: str, error: BaseException, command: Command | None = None) -> None:
        """Mark the drive as failed.

        Args:
            what: Command or request in which the error occurred.
            error: The exception.
            command: The command; the sequences that it was changing become unreadable.
        """
        reason = self.ftl.nand.failed
        self.ftl.nand.failed = reason or _FAILED  # first: formatting the reason may run out of memory, too
        self._half_changed |= frozenset(self._changed_by(command))
        if reason:
            return
        self.failure = "".join(traceback.format_exception(error))
        said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        self.ftl.nand.failed = (
            f"the drive failed in {what} ({said}) and only reads now; flushed data is safe: {self.remedy}"
        )
        if self.on_failure:
            self.on_failure()

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Run a change that is not a command: it is rejected on a failed drive, and an error in it fails the drive.

        Raises:
            MediaFailedError: The drive has failed.
        """
        if self.ftl.nand.failed:
            raise MediaFailedError(self.ftl.nand.failed)
        try:
            yield
        except FtlError:
            raise
        except BaseException as error:
            self.fail(what, error)
            if not isinstance(error, Exception):
                raise
            raise MediaFailedError(self.ftl.nand.failed) from error

    def _check_failed(self, command: Command) -> None:
        """Raise MediaFailedError for a command that changes something, or reads inconsistent data."""
        verb = VERBS.get(type(command))
        if verb is not None and verb.effect is None and not self._half_changed.intersection(seqs_of(command)):
            return
        raise MediaFailedError(self.ftl.nand.failed)

    def _changed_by(self, command: Command | None) -> list[int]:
        """Handles of sequences that a command changes."""
        verb = VERBS.get(type(command))
        if (
            verb is None
            or verb.effect is None
            or isinstance(verb.effect, MakesDurable | CreatesSequences | NamesPrefixes)
        ):
            return []
        if isinstance(verb.effect, FreesUnnamed):
            return unnamed_sequences(self.state, self.state.tenant)
        return list(seqs_of(command))

    def check(self, command: Command, tenant: int, max_bytes: int = NO_LIMIT) -> tuple[CommandSpec, Run]:
        """Validate a command; returns its row in the command table, and its handler.

        Values of a decode step that a cached plan accepts are checked when it runs.

        Raises:
            InvalidFieldError, FtlError: The command is invalid.
        """
        if run := planned_run(self.state, command, max_bytes):
            return VERBS[Attend], run
        verb = check(self.state, command, max_bytes)
        check_quota(self.state, verb, command, tenant)
        act = HANDLERS[verb.command]
        act.check(self.state, command)
        return verb, act.run

    def _complete(self, verb: CommandSpec, nbytes_in: int, done: Completion, watch: LatencyBreakdown) -> Completion:
        watch.until("flash_program", done.finish_ns)
        assert len(done.data) == len(verb.reply), f"{verb.name} returns {len(done.data)} arrays"
        self.cross_link("in", nbytes_in, watch.start_ns)  # only now: a rejected command changes nothing
        nbytes_out = sum([array.nbytes for array in done.data])
        watch.until("link", self.cross_link("out", nbytes_out, watch.now_ns))
        self.record(verb.name, watch.start_ns, watch.now_ns, verb.reads, verb.writes)
        self.ftl.counters.host_read_bytes += nbytes_out * verb.reads
        self.ftl.counters.host_written_bytes += (nbytes_in - ENTRY_BYTES) * verb.writes
        return Completion(
            status=done.status,
            reason=done.reason,
            submit_ns=watch.start_ns,
            finish_ns=watch.now_ns,
            breakdown_ns=watch.breakdown_ns,
            flash=done.flash,
            link_bytes=nbytes_in + nbytes_out,
            data=done.data,
        )

    def format(self) -> tuple[int, int]:
        """Erase everything.

        Returns:
            Number of sequences erased, and the simulated time that it took, ns.

        Raises:
            MediaFailedError: The drive has failed.
        """
        handles = list(self.ftl.sequences)
        with self.failing("format"):
            self._half_changed = frozenset(handles)  # until everything has succeeded
            took_ns = self.ftl.format(self.now_ns) - self.now_ns
            for handle in handles:
                self.state.close(handle)
            assert took_ns >= 0 and not self.ftl.sequences and not self.state.v_sums
            self.now_ns += took_ns
            self.free_ns = self.now_ns
            self._half_changed = frozenset()
        return len(handles), took_ns

    def set_page_listener(self, listener: Listener) -> None:
        """Set the listener that is called for every flash read and program."""
        self.ftl.timing.listener = listener

    def refuse(self, command: str, status: Status, reason: str, submit_ns: int) -> Completion:
        """Complete a rejected command, which only changes the error log."""
        assert status is not Status.SUCCESS, f"{command} is refused with success"
        self.ftl.counters.refused += 1
        self.state.history.refuse(command, status, reason)
        return Completion(status=status, reason=reason, submit_ns=submit_ns, finish_ns=submit_ns)

    def cross_link(self, way: str, nbytes: int, ready_ns: int) -> int:
        """Return when bytes that are ready have crossed the link, `in` or `out` of the drive, ns."""
        return self._link[way].cross(ready_ns, self.spec.link.transfer_ns(nbytes))

    def record(
        self, kind: str, submit_ns: int, finish_ns: int, reads: bool = False, writes: bool = False, nbytes: int = 0
    ) -> None:
        """Advance the clock to the end of a request, and add it to the latency log and the health counters.

        Args:
            reads, writes: Whether it returned or stored data, `nbytes` of it.
        """
        assert finish_ns >= submit_ns, f"{kind} ended before it began"
        submit_ns, finish_ns, nbytes = int(submit_ns), int(finish_ns), int(nbytes)  # NumPy's integers are no JSON
        counters = self.ftl.counters
        counters.host_reads += reads
        counters.host_writes += writes
        counters.host_read_bytes += nbytes * reads
        counters.host_written_bytes += nbytes * writes
        counters.busy_ns += max(0, finish_ns - max(submit_ns, self.now_ns))  # overlapping busy time counts once
        self.now_ns = max(self.now_ns, finish_ns)
        self.state.history.done(kind, finish_ns - submit_ns, nbytes)
