"""The command loop's body: one command in, one completion out. Check, carry out, complete."""

from __future__ import annotations

from attention_engine import METHODS, Methods
from csd_firmware.acts import ACTS, Run
from csd_firmware.check import NO_LIMIT, Refused, check, nbytes_in
from csd_firmware.short import short_step
from csd_firmware.state import DriveState
from csd_firmware.stopwatch import Stopwatch
from csd_spec import Attend, Command, Completion, DriveSpec, GetLog, Status
from csd_spec.verbs import VERBS, Creates, Forks, Verb
from ftl import FtlError, Listener, MediumFailed, Nand, OutOfSpace, ReadOnly, Uncorrectable, UnknownSequence

STATUS_OF = (
    (Refused, Status.INVALID_FIELD),
    (UnknownSequence, Status.UNKNOWN_SEQUENCE),
    (OutOfSpace, Status.CAPACITY_EXCEEDED),
    (ReadOnly, Status.READ_ONLY),
    (MediumFailed, Status.WRITE_FAULT),
    (Uncorrectable, Status.UNRECOVERED_READ_ERROR),
    (FtlError, Status.INTERNAL_ERROR),
)


class Firmware:
    """One drive's firmware. Commands run one after the other in the order in which they come.

    In modelled time those that need no engine overlap with others: they share the flash, and take turns on the link.
    methods: what it knows of attention, by name. threads: of its kernels.
    """

    def __init__(self, spec: DriveSpec, nand: Nand | None = None, methods: Methods = METHODS, threads: int = 1) -> None:
        self.state = DriveState(spec, nand, methods, threads)
        self.spec, self.ftl, self.methods = spec, self.state.ftl, self.state.methods
        self.free_ns = 0  # modelled time from which the engine can take the next command
        self._link_free_ns = 0  # and from which the link can take what such commands have read
        self._busy_until_ns = 0

    def step(self, command: Command, submit_ns: int, tenant: int = 0, max_bytes: int = NO_LIMIT) -> Completion:
        """Check a command, carry it out and say when it ended and where the time went.

        A completion also waits for its programs, but the engine takes the next command meanwhile. tenant: whose the
        sequences are that it makes. max_bytes: of data in the completion; what would have more is refused.
        """
        watch, self.state.tenant = Stopwatch(submit_ns), tenant
        try:
            if self.ftl.nand.failed and not isinstance(command, GetLog):
                raise MediumFailed(self.ftl.nand.failed)
            verb, run = self._begun(command, max_bytes)
            nbytes = nbytes_in(verb, command)
            watch.spend("link", self.spec.link.command_ns + self.spec.link.transfer_ns(nbytes))
            if not verb.overlaps:
                watch.until("queue", self.free_ns)
            done = run(self.state, command, watch)
        except (Refused, FtlError) as error:
            status = next(status for kind, status in STATUS_OF if isinstance(error, kind))
            return self.refuse(type(command).__name__, status, str(error), submit_ns)
        if not verb.overlaps:
            self.free_ns = watch.now_ns
        if isinstance(verb.effect, Creates | Forks):
            self.ftl.label(done.data[0].tolist(), tenant)
        return self._complete(verb, nbytes, done, watch)

    def _begun(self, command: Command, max_bytes: int) -> tuple[Verb, Run]:
        """The verb of a good command, and what carries it out, or ends what is done already the short way."""
        end = short_step(self.state, command, max_bytes)
        if end:
            return VERBS[Attend], end
        verb = check(self.state, command, max_bytes)
        act = ACTS[verb.command]
        act.check(self.state, command)
        return verb, act.run

    def _complete(self, verb: Verb, nbytes_in: int, done: Completion, watch: Stopwatch) -> Completion:
        watch.until("flash_program", done.finish_ns)
        self._count(verb, watch)
        nbytes_out = sum([array.nbytes for array in done.data])
        if verb.overlaps:
            watch.until("link", self._link_free_ns)
        watch.spend("link", self.spec.link.transfer_ns(nbytes_out))
        if verb.overlaps:
            self._link_free_ns = watch.now_ns
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
        """Forget and erase everything; how many sequences there were, and the modelled nanoseconds that it took."""
        handles = list(self.ftl.sequences)
        took_ns = self.ftl.format(self.free_ns) - self.free_ns
        for handle in handles:
            self.state.close(handle)
        self.free_ns += took_ns
        return len(handles), took_ns

    def listen(self, listener: Listener) -> None:
        """Tell somebody of every page that the flash is asked for."""
        self.ftl.timing.listener = listener

    def refuse(self, command: str, status: Status, reason: str, submit_ns: int) -> Completion:
        """The completion of a command that changes nothing but the error log."""
        self.ftl.counters.refused += 1
        self.state.history.refuse(command, status, reason)
        return Completion(status=status, reason=reason, submit_ns=submit_ns, finish_ns=submit_ns)

    def _count(self, verb: Verb, watch: Stopwatch) -> None:
        counters, took_ns = self.ftl.counters, watch.now_ns - watch.start_ns
        counters.host_reads += verb.reads
        counters.host_writes += verb.writes
        if verb.overlaps:  # what another was busy with at the same time counts once
            counters.busy_ns += max(0, watch.now_ns - max(watch.start_ns, self._busy_until_ns))
            self._busy_until_ns = max(self._busy_until_ns, watch.now_ns)
        else:
            counters.busy_ns += took_ns - watch.breakdown_ns.get("queue", 0)
        self.state.history.done(verb.name, took_ns)
