"""Long commands of a tenant that shares its drive: other tenants get their turns, and the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_firmware.slices import KEYS, SEQUENCES, is_long
from csd_firmware.tenants import Tenant
from csd_spec import (
    Command,
    Completion,
    DriveSpec,
    KvAppend,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvName,
    KvRead,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.arrays import KEY

MANY = 3 * SEQUENCES + 1
CREATE = SeqCreate(MANY, 1, 1, 16, 64)
ROWS = np.ones((4, 1, 16), np.float16)


class FifoLock:
    """Counts turns; between two of them another does something."""

    def __init__(self) -> None:
        self.count, self.between = 0, list[Callable[[], Any]]()

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *exception: object) -> None:
        if self.between:
            self.between.pop(0)()


class Shared:
    """A drive with a tenant that shares it, and one that does not."""

    def __init__(self, spec: DriveSpec) -> None:
        self.firmware, self.turns = Firmware(spec), FifoLock()
        self.tenant = Tenant(self.firmware, b"secret", "alice", 0.5, self.turns)

    def do(self, command: Command, status: Status = Status.SUCCESS) -> Completion:
        self.turns.count = 0
        done = self.tenant.step(command, 5)
        assert done.status is status, done.reason
        assert done.submit_ns == 5 and sum(done.breakdown_ns.values()) == done.latency_ns
        return done

    def make(self) -> tuple[int, ...]:
        return tuple(self.do(CREATE).data[0].tolist())


@pytest.fixture
def shared(small_drive: DriveSpec) -> Shared:
    return Shared(small_drive)


def test_large_create_and_free_run_in_slices(shared: Shared) -> None:
    seqs = shared.make()
    assert len(set(seqs)) == MANY and shared.turns.count == 4
    forks = shared.do(SeqFork(seqs, np.zeros(MANY, np.int64))).data[0].tolist()
    assert len({*forks, *seqs}) == 2 * MANY and shared.turns.count == 4
    shared.do(KvAppend(seqs[-1:], 0, np.array([4]), ROWS, ROWS))
    assert shared.turns.count == 1
    shared.do(KvCrop(seqs, 0, np.full(MANY, 1)))
    assert shared.turns.count == 4
    assert shared.do(KvRead(seqs[-1:], 0)).data[0].shape[0] == 1
    shared.do(KvFree(seqs))
    assert shared.turns.count == 4 and len(shared.firmware.ftl.sequences) == MANY
    assert shared.do(SeqSweep()).data[0].tolist() == [MANY]
    assert shared.turns.count == 5 and not shared.firmware.ftl.sequences
    assert shared.do(SeqSweep()).data[0].tolist() == [0]


def test_large_key_commands_run_in_slices(shared: Shared) -> None:
    seqs = tuple(shared.do(SeqCreate(1, 1, 1, 16, 64)).data[0].tolist())
    shared.do(KvAppend(seqs, 0, np.array([4]), ROWS, ROWS))
    keys = np.arange(2, 2 * (2 * KEYS + 6), dtype=np.uint64).view(KEY)
    shared.do(KvName(seqs, np.arange(keys.size) % 4 + 1, keys))
    assert shared.turns.count == 3
    handles, tokens = shared.do(KvExist(keys)).data
    assert set(handles.tolist()) == set(seqs) and (tokens == np.arange(keys.size) % 4 + 1).all()
    shared.do(KvDrop(keys[5:6]))
    handles, tokens = shared.do(KvExist(keys)).data
    assert shared.turns.count == 1
    assert (handles.size, tokens.size) == (keys.size, keys.size)
    assert handles.tolist() == [*seqs] * 5 + [0] * (keys.size - 5) and not tokens[5:].any()
    shared.do(KvDrop(keys))
    assert shared.turns.count == 3 and not shared.firmware.ftl.kv.names.count


def test_commands_of_only_tenant_are_not_sliced(small_drive: DriveSpec) -> None:
    turns, firmware = FifoLock(), Firmware(small_drive)
    alone = Tenant(firmware, b"secret", "alice", 1.0, turns)
    assert alone.step(CREATE, 0) == replaced(alone, Firmware(small_drive).step(CREATE, 0))
    assert turns.count == 1


def replaced(tenant: Tenant, done: Completion) -> Any:
    """A completion with a tenant's handles, that compares."""

    class Same:
        def __eq__(self, other: object) -> bool:
            assert isinstance(other, Completion)
            theirs = [tenant._handles.decrypt(handle) for handle in other.data[0].tolist()]
            return (other.finish_ns, other.breakdown_ns, theirs) == (
                done.finish_ns,
                done.breakdown_ns,
                done.data[0].tolist(),
            )

        __hash__ = None  # type: ignore[assignment]  # nobody asks for it

    return Same()


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (lambda seqs: KvFree((*seqs, seqs[0])), Status.INVALID_FIELD),
        (lambda seqs: KvFree((*seqs, 7)), Status.UNKNOWN_SEQUENCE),
        (lambda seqs: SeqFork((*seqs, seqs[0]), np.zeros(MANY + 1, np.int64)), Status.INVALID_FIELD),
        (lambda seqs: SeqFork(seqs, np.full(MANY, -1)), Status.INVALID_FIELD),
        (lambda seqs: SeqCreate(MANY, 1, 1, 1 << 20, 64), Status.INVALID_FIELD),
        (lambda seqs: SeqCreate("many", 1, 1, 16, 64), Status.INVALID_FIELD),  # type: ignore[arg-type]
        (lambda seqs: KvCrop(seqs, 0, np.full(MANY - 1, 1)), Status.INVALID_FIELD),
        (
            lambda seqs: KvName(seqs[:1], np.r_[np.ones(KEYS, np.int64), 5], np.zeros(KEYS + 1, KEY)),
            Status.INVALID_FIELD,
        ),
    ],
)
def test_refused_command_executes_no_slice(
    shared: Shared, command: Callable[[tuple[int, ...]], Command], status: Status
) -> None:
    seqs = shared.make()
    shared.do(KvAppend(seqs[:1], 0, np.array([4]), ROWS, ROWS))
    before = shared.firmware.ftl.kv.usage.total.sequences, shared.firmware.ftl.kv.next_handle
    shared.do(command(seqs), status)
    assert (shared.firmware.ftl.kv.usage.total.sequences, shared.firmware.ftl.kv.next_handle) == before
    assert not shared.firmware.ftl.kv.names.count
    assert shared.turns.count == 1, "the refusal goes into the error log"


@pytest.mark.parametrize("command", [lambda seqs: SeqFork(seqs, np.zeros(MANY, np.int64)), lambda seqs: CREATE])
def test_refused_slice_undoes_earlier_slices(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, command: Callable[[tuple[int, ...]], Command]
) -> None:
    """Another tenant takes what the rest of the command needs while it has its turn."""
    seqs = shared.make()
    before = set(shared.firmware.ftl.sequences)

    def other_takes_the_rest() -> None:
        monkeypatch.setattr("ftl.flash.tag.MAX_OWNERS", 2 * len(shared.firmware.ftl.kv.owners.sharers) + 2)

    shared.turns.between = [lambda: None, other_takes_the_rest]
    done = shared.do(command(seqs), Status.CAPACITY_EXCEEDED)
    assert "sequences" in done.reason and set(shared.firmware.ftl.sequences) == before
    assert shared.turns.count == 5, "three slices, and two that are taken back"


def test_a_command_is_long_if_it_has_more_than_a_slice() -> None:
    for more in (0, 1):
        handles, keys = tuple(range(SEQUENCES + more)), np.zeros(KEYS + more, KEY)
        commands = SeqCreate(SEQUENCES + more, 1, 1, 16, 512), KvFree(handles), KvExist(keys), KvDrop(keys)
        assert [is_long(command) for command in commands] == [bool(more)] * 4
