"""A group of KV heads on several drives, or one that can be computed again: a `Drive` that survives lost drives.

A *replica* is a drive that stores the sequences of a group. One of them, the reader, executes a command first. The
others then execute the part of it that changes sequences, so all replicas store the same rows. If a replica fails, it
is dropped: another one becomes the reader and executes the command again. A replacement drive is filled in the
background, with rows that are read from a replica, while the group stays in use.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Condition, RLock, Thread
from typing import Any, Literal, get_args

import numpy as np

from csd_link.replica import Event, EventKind, Replica, ReplicaError, Stored, ended, not_executed, stored_part
from csd_link.splitting import Deferred, SplitRead, max_bytes_of, submit_reads
from csd_spec import Attend, Command, Completion, Drive, KvAppend, KvFree, KvRead, Status, verbs
from csd_spec.model import FP16_BYTES
from csd_spec.verbs import VERBS

Redundancy = Literal["none", "mirror", "recompute"]
REDUNDANCIES: tuple[Redundancy, ...] = get_args(Redundancy)
COPIES: dict[Redundancy, int] = {"none": 1, "mirror": 2, "recompute": 1}  # drives that store each KV head
COPY_TOKENS = 1024  # of a layer of a sequence, read and appended at once
RETRY_S = 2.0  # after no drive was found in place of a lost one
FASTER = 1.25  # a replica becomes the reader if it was faster than the reader by this factor
FAULTS = frozenset(
    {
        Status.PATH_LOST,
        Status.TRANSFER_ERROR,
        Status.INTERNAL_ERROR,
        Status.READ_ONLY,
        Status.WRITE_FAULT,
        Status.UNRECOVERED_READ_ERROR,
    }
)  # for which a drive is dropped; with another status a command would end on every drive


_LOG = logging.getLogger("vcsd")
_SAID = {"lost": "is lost", "failed": "is not replaced"}


@dataclass(slots=True)
class Filling:
    """A drive that is being filled, and the commands to execute on it afterwards: command, handles, simulated ns."""

    backlog: deque[tuple[Command, list[int], int]]
    thread: Thread | None = None


Replacement = Callable[[Drive, Sequence[Drive]], Drive | None]  # for a lost drive; not one of these
Rebuild = Callable[[], Replica | None]  # computes a group's sequences again


def _no_replacement(lost: Drive, in_use: Sequence[Drive]) -> Drive | None:
    return None


def _no_rebuild() -> Replica | None:
    return None


class ReplicatedDrive:
    """A group of KV heads on one or several drives.

    Prefixes by key are refused: a drive may find under a key what is not known on the others. In layouts that round
    rows a replacement stores the rounded rows, and the scores that it makes of them may differ.

    Attributes:
        rebuild: Called when no replica is left; returns one with all sequences, or None.
        recent: Commands since `forget_recent` that have stored rows; None if they are not kept.
        events: Lost and replaced drives, in order.
    """

    def __init__(self, devices: Sequence[Drive], replacement: Replacement = _no_replacement) -> None:
        """Create a group.

        Args:
            devices: Drives that store the group; the first is the reader.
            replacement: Finds a drive to fill after one was lost; may take seconds.
        """
        self._live = [Replica(device) for device in devices]
        self._replacement = replacement
        self._to_replace: deque[Replica] = deque()
        self._retry_at = 0.0  # time.monotonic() before which none is replaced, s
        self._filling: Filling | None = None
        self._sequences: dict[int, Stored] = {}
        self._created, self._now_ns, self._closed = 0, 0, False
        self._lock = RLock()
        self._filled = Condition(self._lock)
        self.rebuild: Rebuild = _no_rebuild
        self.recent: list[Command] | None = None
        self.events: list[Event] = []
        self.name, self.spec = devices[0].name, devices[0].spec
        self.max_bytes = min(map(max_bytes_of, devices))

    @property
    def drives(self) -> list[Drive]:
        """Drives that currently store the group."""
        return [replica.device for replica in self._live]

    def forget_recent(self) -> None:
        """Empty `recent`: `rebuild` computes what was stored until now."""
        with self._lock:
            self.recent = []

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        verb = VERBS[type(command)]
        if isinstance(verb.effect, verbs.NamesPrefixes | verbs.FreesUnnamed) or verb.name in ("KvExist", "KvList"):
            return ended(not_executed(Status.INVALID_OPCODE, submit_ns, f"{verb.name}: prefixes have no redundancy"))
        with self._lock:
            if unserved := self._unserved(command, submit_ns):
                return ended(unserved)
            reader = self._choose(command)
            future = reader.submit(command, submit_ns)
        return Deferred(lambda: self._end(reader, future, command, submit_ns))

    def hand_over(self, drive: Drive) -> None:
        """Fill another drive in the background, then stop using this one."""
        with self._lock:
            for replica in self._live:
                if replica.device is drive and not replica.is_leaving:
                    replica.is_leaving = True
                    self._to_replace.append(replica)
            self._replace_lost()

    def wait_filled(self, timeout_s: float | None = None) -> bool:
        """Wait until no drive is being filled; returns whether this is so."""
        with self._filled:
            return self._filled.wait_for(lambda: self._filling is None, timeout_s)

    def close(self) -> None:
        """Stop filling. Drives stay open, except for one that `rebuild` has made."""
        with self._lock:
            self._closed, filling = True, self._filling
        if filling and filling.thread:
            filling.thread.join()
        for replica in self._live:
            if replica.is_temporary:
                replica.device.close()

    def _choose(self, command: Command) -> Replica:
        """The replica that executes a command first: the one that was reader, unless another one is faster."""
        if isinstance(command, Attend) and len(self._live) > 1:
            fastest = min(self._live, key=lambda replica: replica.latency_ns)
            if fastest.latency_ns * FASTER < self._live[0].latency_ns:
                self._live.remove(fastest)
                self._live.insert(0, fastest)
        return self._live[0]

    def _end(self, reader: Replica, future: Future[Completion], command: Command, submit_ns: int) -> Completion:
        """Completion of a command; after a fault, that of another replica. The others execute its stored part."""
        done, first = future.result(), reader
        with self._lock:
            while reason := self._fault(reader, done):
                self._drop(reader, reason)
                if unserved := self._unserved(command, submit_ns):
                    return unserved if unserved.status is Status.SUCCESS else replace(unserved, reason=reason)
                reader = self._live[0]
                done = reader.submit(command, submit_ns).result()
            if reader is not first:
                self._log("served", reader.device)
            if done.status is Status.SUCCESS:
                done = self._executed(reader, command, done)
            self._replace_lost()
            return done

    def _fault(self, reader: Replica, done: Completion) -> str:
        """Why a completion of a replica does not count; empty if it does."""
        if done.status in FAULTS:
            return done.reason or done.status.name
        try:
            reader.settle()
        except ReplicaError as error:
            return str(error)
        return ""

    def _executed(self, reader: Replica, command: Command, done: Completion) -> Completion:
        """Let the other replicas follow a command that the reader has executed; returns the host's completion."""
        self._now_ns = max(self._now_ns, done.finish_ns)
        effect = VERBS[type(command)].effect
        if isinstance(command, Attend):
            reader.latency_ns = done.latency_ns
        if effect is None:
            return done
        others = [replica for replica in self._live if replica is not reader]
        if isinstance(effect, verbs.MakesDurable):
            return max([done, *self._flushed(others, done.submit_ns)], key=lambda completion: completion.finish_ns)
        created = self._note(command)
        if created:
            reader.know(created, done)
            done = replace(done, data=(np.array(created, np.uint64),))
        reader.remember(stored_part(command), created)
        for replica in others:
            self._guarded(replica, lambda follower: follower.follow(command, created, done.finish_ns))
        if others:
            part = stored_part(command)
            copied_bytes = len(others) * VERBS[type(part)].bytes_in(part)
            done = replace(done, link_bytes=done.link_bytes + copied_bytes)
        if self._filling:
            self._filling.backlog.append((command, created, done.finish_ns))
        return done

    def _flushed(self, replicas: Sequence[Replica], submit_ns: int) -> list[Completion]:
        """Flush replicas; returns the completions of successful flushes."""
        done = [self._guarded(replica, lambda follower: follower.flush(submit_ns)) for replica in replicas]
        return [completion for completion in done if completion]

    def _guarded(self, replica: Replica, act: Callable[[Replica], Completion | None]) -> Completion | None:
        """Call a function with a replica; drop the replica if it fails."""
        try:
            return act(replica)
        except ReplicaError as error:
            self._drop(replica, str(error))
            return None

    def _note(self, command: Any) -> list[int]:
        """Note what is stored after a command; returns the host's handles of sequences that it creates."""
        created = list[int]()
        match VERBS[type(command)].effect:
            case verbs.CreatesSequences():
                created = self._new_handles(command.count)
                one = replace(command, count=1)
                self._sequences |= {handle: Stored(one, [0] * command.layers) for handle in created}
            case verbs.ForksSequences():
                created = self._new_handles(len(command.seqs))
                for handle, parent, length in zip(created, command.seqs, command.lengths.tolist(), strict=True):
                    stored = self._sequences[parent]
                    self._sequences[handle] = Stored(stored.create, [min(tokens, length) for tokens in stored.lengths])
            case verbs.AppendsRows():
                part: Any = stored_part(command)
                for seq, count in zip(part.seqs, part.lengths.tolist(), strict=True):
                    self._sequences[seq].lengths[part.layer] += count
                if self.recent is not None:
                    self.recent.append(part)
            case verbs.TruncatesSequences():
                for seq, length in zip(command.seqs, command.lengths.tolist(), strict=True):
                    lengths = self._sequences[seq].lengths
                    lengths[command.layer] = min(lengths[command.layer], length)
            case verbs.FreesSequences():
                for seq in command.seqs:
                    self._sequences.pop(seq, None)
        return created

    def _new_handles(self, count: int) -> list[int]:
        first = self._created + 1
        self._created += count
        return list(range(first, first + count))

    def _log(self, kind: EventKind, device: Drive, reason: str = "") -> None:
        if reason:
            _LOG.warning("drive %s %s: %s", device.name, _SAID[kind], reason)
        self.events.append(Event(kind, time.monotonic(), device.name, reason))

    def _drop(self, replica: Replica, reason: str) -> None:
        """Stop using a replica that failed."""
        if replica in self._live:
            self._live.remove(replica)
            self._log("lost", replica.device, reason)
            self._to_replace.append(replica)

    def _unserved(self, command: Command, submit_ns: int) -> Completion | None:
        """Completion of a command that no replica can execute; None if there is one, which may be computed for it."""
        if not self._live and isinstance(command, KvFree):  # nothing is left to free
            self._note(command)
            return not_executed(Status.SUCCESS, submit_ns)
        if not self._live and not self._closed and (rebuilt := self.rebuild()):
            for part in self.recent or ():
                rebuilt.follow(part, [], self._now_ns)
            rebuilt.settle()
            self._live.append(rebuilt)
        return None if self._live else not_executed(Status.PATH_LOST, submit_ns, "no drive is left that stores it")

    def _replace_lost(self) -> None:
        """Start to fill a replacement of a lost drive, one at a time."""
        is_possible = self._to_replace and self._live and not self._filling and not self._closed
        if is_possible and time.monotonic() >= self._retry_at:
            self._fill(self._to_replace.popleft())

    def _fill(self, lost: Replica) -> None:
        """Fill a drive in place of a lost one, in a thread of its own."""
        assert self._filling is None, "two drives are filled at a time"
        source, backlog = self._live[0], deque[tuple[Command, list[int], int]]()
        snapshot = {handle: Stored(stored.create, list(stored.lengths)) for handle, stored in self._sequences.items()}
        if source.history is not None:
            snapshot.clear()
            backlog.extend((command, created, self._now_ns) for command, created in source.history)
        self._filling = filling = Filling(backlog)
        arguments = filling, lost, snapshot
        filling.thread = Thread(target=self._run_filling, args=arguments, name=f"fill {self.name}", daemon=True)
        filling.thread.start()

    def _run_filling(self, filling: Filling, lost: Replica, snapshot: dict[int, Stored]) -> None:
        target, failure = None, ""
        try:
            if not lost.is_leaving:
                self._forget(lost, list(lost.handles))
            if device := self._replacement(lost.device, self.drives):
                target = Replica(device)
                for handle, stored in snapshot.items():
                    self._copy(target, handle, stored)
                while not self._catch_up(filling, target):
                    pass
            else:
                failure = "no drive is free to replace it"
        except Exception as error:  # noqa: BLE001 - on any failure, the group stays in use, and another drive is tried
            failure = str(error) or type(error).__name__
        with self._filled:
            if failure:
                self._not_filled(lost, target, failure)
            self._filling = None
            self._replace_lost()
            self._filled.notify_all()

    def _not_filled(self, lost: Replica, target: Replica | None, failure: str) -> None:
        """Try again, with another drive; later if there was no target."""
        if not target:
            self._retry_at = time.monotonic() + RETRY_S
        failed = target or lost
        self._to_replace.append(failed)
        if not any((event.drive, event.reason) == (failed.device.name, failure) for event in self.events):
            self._log("failed", failed.device, failure)

    def _forget(self, replica: Replica, handles: Sequence[int]) -> None:
        """Free sequences on a drive that stores the group no longer, if it still answers."""
        if handles:
            with suppress(ReplicaError, OSError):
                replica.pending.clear()
                replica.follow(KvFree(tuple(handles)), [], self._now_ns)
                replica.settle()

    def _copy(self, target: Replica, handle: int, stored: Stored) -> None:
        """Store the rows of a sequence on a drive; raises ReplicaError."""
        target.follow(stored.create, [handle], self._now_ns)
        for layer, length in enumerate(stored.lengths):
            first = 0
            while first < length:
                rows = self._read(handle, layer, first, min(COPY_TOKENS, length - first))
                if not rows or not len(rows[0]):
                    break  # the sequence was freed or cropped meanwhile; the backlog has that command
                target.follow(KvAppend((handle,), layer, np.array([len(rows[0])]), *rows), [], self._now_ns)
                target.settle()
                first += len(rows[0])

    def _read(self, handle: int, layer: int, first: int, tokens: int) -> tuple[Any, Any] | None:
        """Keys and values of tokens, (tokens, H, d) each; None if the sequence was freed. Raises ReplicaError."""
        while True:
            with self._lock:
                if self._closed or not self._live:
                    raise ReplicaError("closed" if self._closed else "no drive is left to read from")
                source = self._live[0]
                if handle not in self._sequences or handle not in source.handles:  # freed, or being freed
                    return None
                stored = self._sequences[handle]
                token_bytes = 2 * FP16_BYTES * stored.create.kv_heads * stored.create.head_dim
                command = KvRead((source.handles[handle],), layer, first, tokens)
                read = SplitRead(source.device, command, token_bytes, (stored.lengths[layer],))
                (future,) = submit_reads([read], self._now_ns)
            done = future.result()
            if done.status is Status.SUCCESS:
                k, v = done.data
                return k, v
            with self._lock:
                if handle in self._sequences:
                    self._drop(source, done.reason)

    def _catch_up(self, filling: Filling, target: Replica) -> bool:
        """Execute the backlog on a drive; whether it has joined. Raises ReplicaError."""
        with self._lock:
            if self._closed:
                raise ReplicaError("closed")
            if not filling.backlog:
                self._join(target)
                return True
            steps = [filling.backlog.popleft() for _ in range(len(filling.backlog))]
        for step in steps:
            target.follow(*step)
        target.settle()
        return False

    def _join(self, target: Replica) -> None:
        """Add a filled drive to the replicas; those that were only needed until now leave."""
        assert target not in self._live and not target.pending, f"{target.device.name} joins before it is filled"
        for replica in [replica for replica in self._live if replica.is_temporary or replica.is_leaving]:
            self._live.remove(replica)
            if replica.is_temporary:
                replica.device.close()
            else:
                self._forget(replica, list(self._sequences))
        self._live.append(target)
        self._log("redundant", target.device)
