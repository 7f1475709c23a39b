"""The command loop's body: one command in, one completion out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attention_engine import METHODS, EngineClock, Memory, Queries, Read, Step, add_rows
from csd_firmware import logs
from csd_firmware.check import Refused, check, layout_of
from csd_firmware.schedule import SCHEDULES, Units
from csd_firmware.stopwatch import Stopwatch
from csd_spec import (
    Attend,
    Command,
    Completion,
    DriveSpec,
    FlashCounters,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    KvView,
    SeqCreate,
    Status,
)
from ftl import Ftl, FtlError, Nand, OutOfSpace, PagePlan, ReadOnly, Uncorrectable, UnknownSequence

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


STATUS_OF = (
    (Refused, Status.INVALID_FIELD),
    (UnknownSequence, Status.UNKNOWN_SEQUENCE),
    (OutOfSpace, Status.CAPACITY_EXCEEDED),
    (ReadOnly, Status.READ_ONLY),
    (Uncorrectable, Status.UNRECOVERED_READ_ERROR),
    (FtlError, Status.INTERNAL_ERROR),
)


class Firmware:
    """One drive's firmware. Commands run one after the other in the order in which they come."""

    def __init__(self, spec: DriveSpec, nand: Nand | None = None) -> None:
        self.spec = spec
        self.ftl = Ftl(spec, nand)
        self.engine = EngineClock(spec.engine)
        self.history = logs.History()
        self.ftl.counters.power_cycles += 1
        self.free_ns = 0  # modelled time from which the engine can take the next command
        self._v_sums: dict[int, F32] = {}  # (layers, H, d) of each sequence
        self._memory: dict[tuple[int, int], Memory] = {}  # of a sequence's layer, what methods keep between steps
        for handle, seq in self.ftl.sequences.items():  # what a Nand that was used before holds
            self._v_sums[handle] = np.zeros((seq.layers, seq.heads, seq.layout.head_dim), np.float32)
            for layer in np.flatnonzero(seq.lengths if not seq.failed else []).tolist():
                add_rows(self._v_sums[handle][layer], self.ftl.read_back(handle, layer)[1].view(np.uint16))

    def step(self, command: Command, submit_ns: int) -> Completion:
        """Check a command, carry it out and say when it ended and where the time went.

        A completion also waits for its programs, but the engine takes the next command meanwhile.
        """
        watch = Stopwatch(submit_ns)
        try:
            check(self.ftl, command)
            watch.spend("link", self.spec.link.command_ns + self.spec.link.transfer_ns(_nbytes_in(command)))
            watch.until("queue", self.free_ns)
            done = self._carry_out(command, watch)
        except (Refused, FtlError) as error:
            status = next(status for kind, status in STATUS_OF if isinstance(error, kind))
            return self.refuse(type(command).__name__, status, str(error), submit_ns)
        self.free_ns = watch.now_ns
        watch.until("flash_program", done.finish_ns)
        self._count(command, watch)
        nbytes_out = sum(array.nbytes for array in done.data)
        watch.spend("link", self.spec.link.transfer_ns(nbytes_out))
        return replace(
            done,
            submit_ns=submit_ns,
            finish_ns=watch.now_ns,
            breakdown_ns=watch.breakdown_ns,
            link_bytes=_nbytes_in(command) + nbytes_out,
        )

    def refuse(self, command: str, status: Status, reason: str, submit_ns: int) -> Completion:
        """The completion of a command that changes nothing but the error log."""
        self.ftl.counters.refused += 1
        self.history.refuse(command, status, reason)
        return Completion(status=status, reason=reason, submit_ns=submit_ns, finish_ns=submit_ns)

    def _carry_out(self, command: Command, watch: Stopwatch) -> Completion:
        match command:
            case SeqCreate():
                return self._create(command)
            case KvAppend():
                programmed, finish_ns = self._append(command, command.lengths, watch)
                flash = FlashCounters(pages_programmed=programmed)
                return Completion(status=Status.SUCCESS, flash=flash, finish_ns=finish_ns)
            case Attend():
                # The new token waits in DRAM; if it completes a group, that is programmed in the background.
                v_sums = {handle: self._v_sums[handle][command.layer].copy() for handle in command.seqs}
                programmed, _ = self._append(command, np.ones(len(command.seqs), np.int64), watch)
                try:
                    output, flash = self._attend(command, watch)
                except Exception as error:  # whatever a method raises, of ours or of the user's, or lost data
                    self._take_back(command, v_sums, watch.now_ns)
                    if isinstance(error, FtlError):
                        raise
                    reason = f"method {command.method}: {type(error).__name__}: {error}"
                    raise Refused(reason) from error
                flash += FlashCounters(pages_programmed=programmed)
                return Completion(status=Status.SUCCESS, data=(output.astype(np.float16),), flash=flash)
            case KvRead():
                return self._read(command, watch)
            case KvCrop():
                return self._crop(command, watch)
            case KvFree():
                self.ftl.free(command.seqs, watch.now_ns)
                for handle in command.seqs:
                    for layer in range(self._v_sums.pop(handle).shape[0]):
                        self._memory.pop((handle, layer), None)
            case GetLog():
                return Completion(status=Status.SUCCESS, data=(logs.page_bytes(self.ftl, self.history, command.page),))
            case Flush():
                return Completion(status=Status.SUCCESS, finish_ns=self.ftl.flush(watch.now_ns))
        return Completion(status=Status.SUCCESS)

    def _count(self, command: Command, watch: Stopwatch) -> None:
        counters, took_ns = self.ftl.counters, watch.now_ns - watch.start_ns
        counters.host_reads += isinstance(command, Attend | KvRead)
        counters.host_writes += isinstance(command, Attend | KvAppend)
        counters.busy_ns += took_ns - watch.breakdown_ns.get("queue", 0)
        self.history.done(command, took_ns)

    def _attend(self, command: Attend, watch: Stopwatch) -> tuple[F32, FlashCounters]:
        """One decode step: a method says what it needs and attends, a schedule says how long that takes."""
        view = self.ftl.view(command.seqs, command.layer)
        B, H, G, d = command.q.shape
        queries = Queries(
            command.q.astype(np.float32).reshape(B * H, G, d),
            command.r,
            np.repeat(command.top_k, H),
            np.repeat(command.recent, H),
            self._v_means(command, view),
            [self._memory.setdefault((handle, command.layer), {}) for handle in command.seqs],
        )
        step = Step(view, self.ftl, queries)
        output = METHODS[command.method](step)
        SCHEDULES[self.spec.engine.schedule](step.work, Units(self.ftl, self.engine), watch)
        fetched = [_flash_read(item.plan) for item in step.work if isinstance(item, Read)]
        return output.reshape(B, H, G, d), sum(fetched, FlashCounters())

    def _take_back(self, command: Attend, v_sums: dict[int, F32], now_ns: int) -> None:
        """Remove the token that a step has stored before it failed; from sequences that lost data nothing is taken."""
        for handle in (handle for handle in command.seqs if not self.ftl.sequences[handle].failed):
            length = int(self.ftl.sequence(handle).lengths[command.layer])
            self.ftl.crop(handle, command.layer, length - 1, now_ns)
            self._v_sums[handle][command.layer] = v_sums[handle]
            self._memory.pop((handle, command.layer), None)

    def _v_means(self, command: Attend, view: KvView) -> F32:
        sums = np.concatenate([self._v_sums[handle][command.layer] for handle in command.seqs])
        means: F32 = np.divide(sums, view.seq_lens[:, None], dtype=np.float32)
        return means

    def _create(self, command: SeqCreate) -> Completion:
        handles = self.ftl.create(command.count, command.layers, command.kv_heads, layout_of(self.spec, command))
        shape = command.layers, command.kv_heads, command.head_dim
        self._v_sums |= {handle: np.zeros(shape, np.float32) for handle in handles}
        return Completion(status=Status.SUCCESS, data=(np.array(handles, np.uint64),))

    def _append(self, command: KvAppend | Attend, lengths: I64, watch: Stopwatch) -> tuple[int, int]:
        done = self.ftl.append(command.seqs, command.layer, lengths, command.k, command.v, watch.now_ns)
        for handle, rows in zip(
            command.seqs, np.split(command.v.view(np.uint16), np.cumsum(lengths)[:-1]), strict=True
        ):
            add_rows(self._v_sums[handle][command.layer], rows)
        return done

    def _read(self, command: KvRead, watch: Stopwatch) -> Completion:
        rows, flash = [], FlashCounters()
        for handle in command.seqs:
            k, v, plan = self.ftl.read_back(handle, command.layer)
            watch.until("flash_token", self.ftl.read(plan, watch.now_ns))
            flash += _flash_read(plan)
            rows.append((k, v))
        data = tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))
        return Completion(status=Status.SUCCESS, data=data, flash=flash)

    def _crop(self, command: KvCrop, watch: Stopwatch) -> Completion:
        """Cut sequences; the sum of V is not undone but added up again, so that it stays the sum in token order."""
        flash = FlashCounters()
        for handle, length in zip(command.seqs, command.lengths, strict=True):
            watch.until("flash_token", self.ftl.crop(handle, command.layer, int(length), watch.now_ns))
            _, v, plan = self.ftl.read_back(handle, command.layer)
            watch.until("flash_token", self.ftl.read(plan, watch.now_ns))
            flash += _flash_read(plan)
            self._memory.pop((handle, command.layer), None)
            self._v_sums[handle][command.layer] = 0
            add_rows(self._v_sums[handle][command.layer], v.view(np.uint16))
        return Completion(status=Status.SUCCESS, flash=flash)


def _flash_read(plan: PagePlan) -> FlashCounters:
    return FlashCounters(
        pages_read=plan.useful.size, useful_bytes=int(plan.useful.sum()), fetched_bytes=int(plan.nbytes.sum())
    )


def _nbytes_in(command: Command) -> int:
    """Bytes that a command brings to the drive, its 64-byte entry included."""
    arrays = [getattr(command, name) for name in getattr(command, "__slots__", ())]
    return 64 + sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
