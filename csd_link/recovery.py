"""Recovery from drive restarts: keeps unflushed data on the host and replays it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_link.driveset import RECOVERY_S
from csd_link.host_end import AttachedDrive, DriveLostError, HeartbeatTimeoutError, TakenError
from csd_link.splitting import Deferred
from csd_spec import (
    Command,
    Completion,
    DriveSpec,
    Flush,
    KvAppend,
    KvCrop,
    KvDrop,
    KvFree,
    KvName,
    SeqCreate,
    SeqFork,
    Status,
)
from csd_spec.arrays import F16, U64, key_list, keys_of
from csd_spec.layouts import layout_of
from csd_spec.verbs import (
    VERBS,
    AppendsRows,
    Array,
    ArrayType,
    CreatesSequences,
    ForksSequences,
    FreesSequences,
    FreesUnnamed,
    MakesDurable,
    NamesPrefixes,
    SequenceAccess,
    TruncatesSequences,
)


@dataclass(slots=True)
class UnflushedLayer:
    """A layer of a sequence: the first `kept` tokens are in flash; the later ones are kept here."""

    kept: int = 0
    rows: list[tuple[F16, F16]] = field(default_factory=list)  # k, v, each (tokens, H, d)

    @property
    def length(self) -> int:
        return self.kept + sum(len(k) for k, _ in self.rows)

    def crop(self, length: int) -> None:
        """Truncate to the first `length` tokens."""
        while self.rows and self.length > length:
            k, v = self.rows.pop()
            left = length - self.length
            if left > 0:
                self.rows.append((k[:left], v[:left]))
        self.kept = min(self.kept, length)
        assert self.length <= length


@dataclass(slots=True)
class SequenceJournal:
    """Replay state of one sequence."""

    create: SeqCreate | tuple[int, int] | None  # or (parent, length) of a fork; None: found under a key
    handle: int  # current one on the drive
    layers: list[UnflushedLayer]  # empty if it was found under a key, or forked from one that was
    flushed: bool = False  # whether the drive still has it after a restart
    names: dict[bytes, int] = field(default_factory=dict)  # keys of prefixes -> tokens
    lossy: bool = False  # whether its layout rounds the rows of a full group


class RecoveringDrive:
    """A `Device` whose drive may die and be restarted at any time.

    KV rows are kept here until a flush acknowledges them. After a restart, the state is replayed: flushed
    sequences are present, those freed since are freed, the rest is created and appended again. Then the command that
    was in flight is submitted again. Before a truncation in a layout that rounds rows, everything is flushed. Forks,
    and changes of sequences that were found under a key, are flushed at once: by the next flush, their origin may be
    gone. Methods that keep state between steps (`h2o`) start again. The handles that the host sees are assigned here: a
    drive may reuse handles that it has forgotten.

    Args:
        connect: Attaches to the drive, or raises DriveLostError.
        recovery_s: Wall-clock time within which the drive has to be restarted, seconds.
    """

    def __init__(self, connect: Callable[[], AttachedDrive], recovery_s: float = RECOVERY_S) -> None:
        self._connect, self._device, self._recovery_s = connect, connect(), recovery_s
        self.node: str = getattr(connect, "node", "")  # name of the machine, if known
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self.name)
        self._held: dict[int, SequenceJournal] = {}  # by the handle that the host knows
        self._created = 0
        self._freed: list[int] = []  # flushed handles that were freed since
        self._dropped: set[bytes] = set()  # keys unbound since the last flush
        self._gone: DriveLostError | None = None
        self.recoveries: list[tuple[float, float]] = []  # wall time at which each began and ended, time.monotonic()

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def spec(self) -> DriveSpec:
        return self._device.spec

    @property
    def max_bytes(self) -> int:
        """See `WindowDrive.max_bytes`."""
        return self._device.max_bytes

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        if VERBS[type(command)].overlaps:
            begun = self._worker.submit(self._begin, command, submit_ns)
            return Deferred(lambda: self._end(begun.result().result(), command, submit_ns))
        return self._worker.submit(self._run, command, submit_ns)

    def _begin(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Submit a command that changes nothing; it may be in flight concurrently with others."""
        return self._device.submit(self._with_drive_handles(command), submit_ns)

    def _end(self, done: Completion, command: Command, submit_ns: int) -> Completion:
        """Return its completion; if the drive died, the command is submitted again."""
        return self._worker.submit(self._run, command, submit_ns).result() if done.status is Status.PATH_LOST else done

    def close(self) -> None:
        self._worker.shutdown()
        self._device.close()

    def _run(self, command: Command, submit_ns: int) -> Completion:
        """Submit a command until it completes or the drive is lost permanently."""
        try:
            while True:
                if self._gone:
                    raise self._gone
                if self._rounds_unflushed(command):
                    return self._after_flush(command, submit_ns)
                done = self._device.submit(self._with_drive_handles(command), submit_ns).result()
                if done.status is not Status.PATH_LOST:
                    done = self._remember(command, done)
                    return self._flush_after(command, done) if self._needs_flush(command, done) else done
                if isinstance(
                    self._device.lost, HeartbeatTimeoutError | TakenError
                ):  # the drive still has its state: nothing to replay
                    raise self._device.lost
                if isinstance(VERBS[type(command)].effect, FreesSequences):
                    return self._retry_free(command, done.reason, submit_ns)
                self._recover(done.reason, submit_ns)
        except DriveLostError as lost:
            self._gone = lost
            return Completion(status=Status.PATH_LOST, reason=str(lost), submit_ns=submit_ns, finish_ns=submit_ns)

    def _with_drive_handles(self, command: Command) -> Command:
        """Replace the host's handles with the drive's current ones."""
        if VERBS[type(command)].access is SequenceAccess.NONE:
            return command
        seqs: Sequence[int] = command.seqs  # type: ignore[union-attr]  # those whose verb names sequences have them
        now = tuple(self._held[handle].handle if handle in self._held else 0 for handle in seqs)
        return replace(command, seqs=now)  # type: ignore[arg-type]  # as above

    def _remember(self, command: Command, done: Completion) -> Completion:
        """Update the replay state after a command; returns the completion with the host's handles."""
        if done.status is not Status.SUCCESS:
            return done
        c: Any = command  # fields depend on the effect
        match VERBS[type(command)].effect:
            case ForksSequences():
                return replace(done, data=(self._hold_forks(c, done),))
            case NamesPrefixes():
                self._bind(key_list(c.keys), c)
            case CreatesSequences():
                return replace(done, data=(self._hold(c, done),))
            case AppendsRows(lengths):
                counts = getattr(c, lengths) if lengths else np.ones(len(c.seqs), np.int64)
                cuts = np.cumsum(counts)[:-1]
                rows = zip(np.split(c.k, cuts), np.split(c.v, cuts), strict=True)
                for handle, row in zip(c.seqs, rows, strict=True):
                    if self._held[handle].layers:
                        self._held[handle].layers[c.layer].rows.append(row)
            case TruncatesSequences():
                for handle, length in zip(c.seqs, c.lengths.tolist(), strict=True):
                    held = self._held[handle]
                    if held.layers:
                        held.layers[c.layer].crop(length)
                    self._unname(held, [key for key, tokens in held.names.items() if tokens > length])
            case FreesSequences():
                gone = [self._held.pop(handle) for handle in c.seqs]
                self._freed += [journal.handle for journal in gone if journal.flushed]
                for journal in gone:
                    self._unname(journal, list(journal.names))
            case FreesUnnamed():
                self._held.clear()  # sequences with keys are found again by key
            case MakesDurable():
                for journal in self._held.values():
                    journal.flushed = True
                    journal.layers = [UnflushedLayer(layer.length) for layer in journal.layers]
                    journal.names.clear()
                self._freed.clear()
                self._dropped.clear()
            case None:
                pairs = zip(VERBS[type(command)].reply, done.data, strict=True)
                return replace(done, data=tuple(self._with_host_handles(array, data) for array, data in pairs))
        return done

    def _needs_flush(self, command: Command, done: Completion) -> bool:
        """Whether the command could not be replayed after a restart, so that it needs a flush."""
        if done.status is not Status.SUCCESS:
            return False
        effect = VERBS[type(command)].effect
        seqs: Sequence[int] = getattr(command, "seqs", ())
        held = [self._held[handle] for handle in seqs if handle in self._held]
        unknown = any(not journal.layers for journal in held)
        return isinstance(effect, ForksSequences | FreesUnnamed) or (
            unknown and isinstance(effect, TruncatesSequences | AppendsRows)
        )

    def _rounds_unflushed(self, command: Command) -> bool:
        """Whether a truncation may reopen a full group of rounded rows, which a replay would not round."""
        if not isinstance(command, KvCrop):
            return False
        lossy = [self._held[handle] for handle in command.seqs if handle in self._held and self._held[handle].lossy]
        return any(not journal.flushed or any(layer.rows for layer in journal.layers) for journal in lossy)

    def _after_flush(self, command: Command, submit_ns: int) -> Completion:
        """Carry out a command after a flush."""
        flushed = self._run(Flush(), submit_ns)
        if flushed.status is not Status.SUCCESS:
            return flushed
        done = self._run(command, flushed.finish_ns)
        return replace(done, submit_ns=submit_ns, breakdown_ns=_sum(flushed.breakdown_ns, done.breakdown_ns))

    def _flush_after(self, command: Command, done: Completion) -> Completion:
        """Flush after a command; returns its completion once it is durable."""
        flushed = self._run(Flush(), done.finish_ns)
        if flushed.status is not Status.SUCCESS:
            if isinstance(VERBS[type(command)].effect, ForksSequences):
                self._undo(done.data[0].tolist(), flushed.finish_ns)
            return flushed
        return replace(done, finish_ns=flushed.finish_ns, breakdown_ns=_sum(done.breakdown_ns, flushed.breakdown_ns))

    def _undo(self, forks: list[int], submit_ns: int) -> None:
        """Free sequences that are not reported to the host."""
        for handle in forks:
            theirs = self._held.pop(handle).handle
            self._freed.append(theirs)
            self._device.submit(KvFree((theirs,)), submit_ns).result()

    def _unname(self, held: SequenceJournal, keys: list[bytes]) -> None:
        """Unbind keys of freed or truncated tokens; before the last flush they may have named another sequence."""
        for key in keys:
            del held.names[key]
        self._dropped |= set(keys)

    def _bind(self, keys: list[bytes], command: Any) -> None:
        """Bind keys to a sequence, or unbind them."""
        for held in self._held.values():
            for key in keys:
                held.names.pop(key, None)
        if isinstance(command, KvName):
            self._held[command.seqs[0]].names |= dict(zip(keys, command.tokens.tolist(), strict=True))
            self._dropped -= set(keys)
        else:
            self._dropped |= set(keys)

    def _with_host_handles(self, array: Array, data: NDArray[Any]) -> NDArray[Any]:
        """Convert an array of a reply to the host's handles; unknown sequences get new ones."""
        if array.kind is not ArrayType.HANDLES:
            return data
        ours = {held.handle: handle for handle, held in self._held.items()}
        for theirs in data.tolist():
            if theirs and theirs not in ours:
                self._created += 1
                ours[theirs] = self._created
                self._held[self._created] = SequenceJournal(None, theirs, [], flushed=True)
        return np.array([ours.get(theirs, 0) for theirs in data.tolist()], np.uint64)

    def _hold_forks(self, fork: SeqFork, done: Completion) -> U64:
        """Assign handles to forks."""
        ours = np.arange(self._created + 1, self._created + 1 + len(fork.seqs), dtype=np.uint64)
        self._created += len(fork.seqs)
        forks = zip(fork.seqs, fork.lengths.tolist(), ours.tolist(), done.data[0].tolist(), strict=True)
        for parent, length, handle, theirs in forks:
            layers = [UnflushedLayer(min(layer.length, length)) for layer in self._held[parent].layers]
            self._held[handle] = SequenceJournal((parent, length), theirs, layers, lossy=self._held[parent].lossy)
        return ours

    def _hold(self, create: SeqCreate, done: Completion) -> U64:
        """Assign handles to created sequences."""
        ours = np.arange(self._created + 1, self._created + 1 + create.count, dtype=np.uint64)
        self._created += create.count
        single = replace(create, count=1)
        for handle, theirs in zip(ours.tolist(), done.data[0].tolist(), strict=True):
            layers = [UnflushedLayer() for _ in range(create.layers)]
            self._held[handle] = SequenceJournal(single, theirs, layers, lossy=not layout_of(create.layout).keeps_rows)
        return ours

    def _retry_free(self, command: Command, reason: str, submit_ns: int) -> Completion:
        """Complete a free that was in flight when the drive died: the replay frees the sequences in any case."""
        seqs: Sequence[int] = command.seqs  # type: ignore[union-attr]  # those whose verb frees sequences name them
        gone = [self._held.pop(handle) for handle in seqs if handle in self._held]
        self._freed += [journal.handle for journal in gone]
        for journal in gone:
            self._unname(journal, list(journal.names))
        self._recover(reason, submit_ns)
        return Completion(status=Status.SUCCESS, submit_ns=submit_ns, finish_ns=submit_ns)

    def _recover(self, reason: str, submit_ns: int) -> None:
        """Wait for the drive and replay its state, even if it dies again; raises DriveLostError."""
        began = time.monotonic()
        while True:
            self._device.close()
            self._reconnect(reason)
            if self._replay(submit_ns):
                break
        self.recoveries.append((began, time.monotonic()))

    def _reconnect(self, reason: str) -> None:
        if not self._device.identity.restarts:
            raise DriveLostError(f"{self.name}: {reason}, and it is not restarted")
        deadline = time.monotonic() + self._recovery_s
        while True:
            try:
                self._device = self._connect()
                return
            except OSError as error:  # DriveLostError, or a missing mount
                if time.monotonic() > deadline:
                    raise DriveLostError(
                        f"{self.name}: {reason}, and no attempt in {self._recovery_s:g} s attached: {error}"
                    ) from None
                time.sleep(0.01)

    def _replay(self, submit_ns: int) -> bool:
        """Replay lost state; returns False if the drive died again.

        Raises DriveLostError if the drive lacks data that it had acknowledged.
        """
        try:
            # Free first what is created again, since the drive may have it, and handles are reused
            unsure = [held.handle for held in self._held.values() if not held.flushed]
            for handle in (*self._freed, *unsure):
                self._resubmit(KvFree((handle,)), submit_ns, Status.UNKNOWN_SEQUENCE)
            for held in self._held.values():
                if not held.flushed:
                    held.handle = int(self._resubmit(self._recreate_command(held), submit_ns).data[0][0])
                for number, layer in enumerate(held.layers):
                    self._replay_layer(held, number, layer, submit_ns)
            if self._dropped:
                self._resubmit(KvDrop(keys_of(self._dropped)), submit_ns)
            for held in self._held.values():
                if held.names:
                    tokens = np.array([*held.names.values()])
                    self._resubmit(KvName((held.handle,), tokens, keys_of(held.names)), submit_ns)
            return True
        except _DriveLostDuringReplay:
            return False

    def _recreate_command(self, held: SequenceJournal) -> Command:
        """Return the command that creates a lost sequence again."""
        if isinstance(held.create, SeqCreate):
            return held.create
        assert held.create is not None, "a sequence that was found is known to the drive"
        parent, length = held.create
        return SeqFork((self._held[parent].handle,), np.array([length]))

    def _replay_layer(self, held: SequenceJournal, number: int, layer: UnflushedLayer, submit_ns: int) -> None:
        seqs = (held.handle,)
        if held.flushed or isinstance(held.create, tuple):
            self._resubmit(KvCrop(seqs, number, np.array([layer.kept])), submit_ns)
        if layer.rows:
            k, v = (np.concatenate(parts) for parts in zip(*layer.rows, strict=True))
            self._resubmit(KvAppend(seqs, number, np.array([len(k)]), k, v), submit_ns)

    def _resubmit(self, command: Command, submit_ns: int, also: Status = Status.SUCCESS) -> Completion:
        done = self._device.submit(command, submit_ns).result()
        if done.status is Status.PATH_LOST:
            raise _DriveLostDuringReplay
        if done.status in (Status.WRITE_FAULT, Status.CAPACITY_EXCEEDED):
            raise DriveLostError(f"{self.name} came back and cannot take what it has lost again: {done.reason}")
        if done.status not in (Status.SUCCESS, also):
            raise DriveLostError(f"{self.name} came back without what it had acknowledged: {done.reason}")
        return done


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Sum two breakdowns by unit."""
    return {unit: first.get(unit, 0) + second.get(unit, 0) for unit in {**first, **second}}


class _DriveLostDuringReplay(Exception):
    """The drive died during the replay."""
