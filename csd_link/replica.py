"""A drive that stores the sequences of a group of KV heads which other drives may store too."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from csd_spec import Attend, Command, Completion, Drive, Flush, KvAppend, SeqCreate, Status
from csd_spec.verbs import VERBS, FreesSequences, SequenceAccess

MAX_PENDING = 64  # commands that another replica has executed and this one has not

EventKind = Literal["lost", "served", "redundant", "failed"]


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a group's redundancy.

    Attributes:
        kind: A drive was lost; the first command after that was served; a replacement was filled; or that failed.
        at: time.monotonic(), s.
        drive: Its name.
        reason: Why it was lost or could not be filled.
    """

    kind: EventKind
    at: float
    drive: str
    reason: str = ""


class ReplicaError(Exception):
    """A replica could not execute a command that another replica has executed."""


@dataclass(slots=True)
class Stored:
    """A sequence. create: for one sequence; lengths: tokens stored in each layer."""

    create: SeqCreate
    lengths: list[int]


@dataclass(slots=True, eq=False)
class Replica:
    """A drive that stores a group's sequences.

    Attributes:
        handles: The drive's handle of each sequence, by the host's.
        pending: Commands that another replica has executed and that were submitted to this drive.
        latency_ns: Simulated time of its last Attend; 0 before the first.
        is_temporary: Whether it is closed as soon as a filled drive takes its place.
        is_leaving: Whether its sequences are freed then.
        history: Commands that make what it stores, with the host's handles of sequences that they create; None if the
            rows are to be read. Layouts that round rows need it for an exact copy.
    """

    device: Drive
    handles: dict[int, int] = field(default_factory=dict)
    pending: deque[Future[Completion]] = field(default_factory=deque)
    latency_ns: int = 0
    is_temporary: bool = False
    is_leaving: bool = False
    history: list[tuple[Command, list[int]]] | None = None

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        """Submit a command with this drive's handles in place of the host's."""
        verb, translated = VERBS[type(command)], command
        if verb.access is not SequenceAccess.NONE:
            seqs: Sequence[int] = getattr(command, "seqs", ())
            if isinstance(verb.effect, FreesSequences):
                theirs = tuple(self.handles.pop(seq, 0) for seq in seqs)
            else:
                theirs = tuple(self.handles.get(seq, 0) for seq in seqs)
            fields: dict[str, Any] = {"seqs": theirs}
            translated = replace(command, **fields)
        return self.device.submit(translated, submit_ns)

    def know(self, created: list[int], done: Completion) -> None:
        """Note its handles of sequences that a command has created."""
        assert self.handles.keys().isdisjoint(created), f"{self.device.name}: sequences {created} are known"
        self.handles |= dict(zip(created, done.data[0].tolist(), strict=True))

    def remember(self, part: Command, created: list[int]) -> None:
        """Add a command that has changed sequences to the history, if there is one."""
        if self.history is not None:
            self.history.append((part, created))

    def follow(self, command: Command, created: list[int], submit_ns: int) -> None:
        """Execute a command that another replica has executed; raises ReplicaError.

        Args:
            command: A command that changes sequences.
            created: Host's handles of the sequences that it creates.
            submit_ns: Simulated time, ns.
        """
        part = stored_part(command)
        self.pending.append(self.submit(part, submit_ns))
        self.remember(part, created)
        if created:
            self.know(created, self.settle())
            assert not self.pending
        while self.pending and (self.pending[0].done() or len(self.pending) > MAX_PENDING):
            check(self.pending.popleft().result())

    def flush(self, submit_ns: int) -> Completion:
        """Completion of a flush after all that was submitted; raises ReplicaError."""
        self.pending.append(self.device.submit(Flush(), submit_ns))
        return self.settle()

    def settle(self) -> Completion:
        """Wait for pending commands; returns the last one's completion. Raises ReplicaError."""
        done = Completion(status=Status.SUCCESS)
        while self.pending:
            done = check(self.pending.popleft().result())
        return done


def not_executed(status: Status, at_ns: int, reason: str = "") -> Completion:
    """Completion of a command that no drive was asked to execute."""
    return Completion(status=status, reason=reason, submit_ns=at_ns, finish_ns=at_ns)


def ended(completion: Completion) -> Future[Completion]:
    """A future that has its result."""
    future = Future[Completion]()
    future.set_result(completion)
    return future


def check(done: Completion) -> Completion:
    """The completion; raises ReplicaError unless the command succeeded."""
    if done.status is not Status.SUCCESS:
        raise ReplicaError(done.reason or done.status.name)
    return done


def stored_part(command: Command) -> Command:
    """The part of a command that changes sequences."""
    if not isinstance(command, Attend):
        return command
    return KvAppend(command.seqs, command.layer, np.ones(len(command.seqs), np.int64), command.k, command.v)
