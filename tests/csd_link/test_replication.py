"""A group of heads on several drives responds as one drive that is never lost.

partner of: csd_link/replica.py
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_link import replication
from csd_link.replica import MAX_PENDING
from csd_link.replication import FAULTS, ReplicatedDrive
from csd_link.spares import Spares
from csd_link.splitting import Deferred
from csd_spec import Attend, Flush, KvAppend, KvCrop, KvExist, KvFree, KvRead, SeqCreate, SeqFork, Status
from csd_spec.arrays import KEY
from tests.failing_device import FailingDevice
from tests.served import until

H, G, D, LAYERS = 2, 2, 16, 2
FILLED_S = 30
SOON = 6  # commands


class Twin:
    """A group of heads, and a drive that does the same and is never lost."""

    def __init__(self, spec, group: ReplicatedDrive, seed: int) -> None:
        self.group, self.plain, self.draw = group, InProcessDrive(spec), random.Random(seed)
        self.rows = np.random.default_rng(seed)
        self.seqs: list[tuple[int, int]] = []  # handles of both

    def both(self, make) -> tuple:
        """Completions of a command on both; make: gives it for the group (0) or the drive (1)."""
        done = self.group.submit(make(0), 0).result(), self.plain.submit(make(1), 0).result()
        assert done[0].status == done[1].status, (done[0].reason, done[1].reason)
        return done

    def same(self, make) -> None:
        for own, theirs in zip(*(completion.data for completion in self.both(make)), strict=True):
            assert np.array_equal(own, theirs)

    def create(self, bits: int = 16) -> None:
        done = self.both(lambda _: SeqCreate(1, LAYERS, H, D, 512, bits))
        self.seqs.append(tuple(int(completion.data[0][0]) for completion in done))

    def values(self, *shape: int) -> np.ndarray:
        return self.rows.standard_normal(shape).astype(np.float16)

    def append(self, seq: tuple[int, int], count: int) -> None:
        for layer in range(LAYERS):
            k, v = self.values(count, H, D), self.values(count, H, D)
            self.same(lambda of, layer=layer, k=k, v=v: KvAppend((seq[of],), layer, np.array([count]), k, v))

    def attend(self, method: str = "sparf") -> None:
        for layer in range(LAYERS):
            rows = len(self.seqs)
            q, k, v = self.values(rows, H, G, D), self.values(rows, H, D), self.values(rows, H, D)
            top, recent = np.full(rows, 12), np.full(rows, 3)
            self.same(
                lambda of, layer=layer, arrays=(q, k, v), budget=(top, recent): Attend(
                    tuple(seq[of] for seq in self.seqs), layer, *arrays, method, 4, *budget
                )
            )

    def crop(self) -> None:
        seq = self.draw.choice(self.seqs)
        layer, length = self.draw.randrange(LAYERS), self.draw.randrange(1, 60)
        for number in (layer, 1 - layer):
            self.same(lambda of, number=number: KvCrop((seq[of],), number, np.array([length])))

    def fork(self) -> None:
        seq, length = self.draw.choice(self.seqs), self.draw.randrange(1, 60)
        done = self.both(lambda of: SeqFork((seq[of],), np.array([length])))
        self.seqs.append(tuple(int(completion.data[0][0]) for completion in done))

    def free(self) -> None:
        seq = self.seqs.pop(self.draw.randrange(len(self.seqs)))
        self.same(lambda of: KvFree((seq[of],)))

    def step(self) -> None:
        act = self.draw.choice(
            [self.attend] * 6 + [self.crop, self.fork, self.flush, self.free, self.create, self.read]
        )
        if act in (self.free, self.fork) and not 2 <= len(self.seqs) <= 5:
            return
        act()
        if act == self.create:
            self.append(self.seqs[-1], self.draw.randrange(1, 40))

    def flush(self) -> None:
        self.same(lambda _: Flush())

    def read(self) -> None:
        for seq in self.seqs:
            for layer in range(LAYERS):
                self.same(lambda of, layer=layer, seq=seq: KvRead((seq[of],), layer))


@pytest.fixture
def drives(small_drive) -> Iterator[list[FailingDevice]]:
    made = [FailingDevice(small_drive, name) for name in "abcdefg"]
    yield made
    for drive in made:
        drive.close()


@pytest.fixture
def twin(small_drive, drives) -> Iterator[Twin]:
    group = ReplicatedDrive(drives[:2], Spares(drives[:2], drives[2:]))
    made = Twin(small_drive, group, 0)
    made.create()
    made.append(made.seqs[0], 40)
    yield made
    group.close()
    made.plain.close()


def end_losses(twin: Twin) -> None:
    """Make a drive that was to fail soon fail now, and wait for its replacement."""
    for drive in twin.group.drives:
        if drive.left < SOON:
            drive.left = 0
    twin.flush()  # of every replica
    assert twin.group.wait_filled(FILLED_S)


@pytest.mark.parametrize("seed", range(12))
def test_random_commands_with_losses_equal_no_losses(small_drive, drives, seed):
    group = ReplicatedDrive(drives[:2], Spares(drives[:2], drives[2:]))
    twin = Twin(small_drive, group, seed)
    twin.create()
    twin.append(twin.seqs[0], 40)
    for number in range(60):
        if number % 12 == 11:
            end_losses(twin)
            victim = twin.draw.choice(group.drives)
            victim.left, victim.status = twin.draw.randrange(1, SOON), twin.draw.choice(sorted(FAULTS))
            victim.applies = twin.draw.random() < 0.5
        twin.step()
    end_losses(twin)
    assert len(group.drives) == 2
    assert [event.kind for event in group.events].count("redundant") >= 4
    group.drives[0].left = 0  # the other one has everything too
    twin.read()
    group.close()
    twin.plain.close()


def test_a_group_takes_what_all_of_its_drives_take(drives, monkeypatch):
    for drive, max_bytes in zip(drives, (5000, 4000, 3000), strict=False):
        monkeypatch.setattr(drive, "max_bytes", max_bytes, raising=False)
    group = ReplicatedDrive(drives[:2])
    assert (group.max_bytes, group.name, group.spec) == (4000, drives[0].name, drives[0].spec)
    assert group.drives == drives[:2]
    group.close()


def test_the_second_drive_serves_after_the_first_one_is_lost(twin, drives):
    drives[0].left = 0
    twin.read()
    assert [event.kind for event in twin.group.events[:2]] == ["lost", "served"]
    assert twin.group.events[0].drive == "a"
    assert twin.group.events[1].drive == "b"


def test_a_drive_is_filled_while_the_group_is_in_use(twin, drives):
    drives[0].left = 0
    for _ in range(20):
        twin.attend()
    assert twin.group.wait_filled(FILLED_S)
    assert {drive.name for drive in twin.group.drives} == {"b", "c"}
    drives[1].left = 0
    twin.attend()
    twin.read()


def test_a_replica_that_cannot_store_is_dropped(twin, drives):
    drives[1].left, drives[1].status = 0, Status.CAPACITY_EXCEEDED
    twin.append(twin.seqs[0], 8)
    until(lambda: twin.group.wait_filled(FILLED_S) and [drive.name for drive in twin.group.drives] == ["a", "c"])


def test_a_command_that_is_refused_drops_no_drive(twin):
    done = twin.group.submit(KvRead((77,), 0), 0).result()
    assert done.status is Status.UNKNOWN_SEQUENCE
    assert not twin.group.events


def test_without_a_replica_commands_end_with_path_lost(twin, drives):
    for drive in drives:
        drive.left = 0
    done = twin.group.submit(Flush(), 7).result()
    assert (done.status, done.finish_ns) == (Status.PATH_LOST, 7)
    done = twin.group.submit(Flush(), 9).result()
    assert (done.status, done.reason) == (Status.PATH_LOST, "no drive is left that stores it")


def test_sequences_of_a_lost_group_can_be_freed(twin, drives):
    for drive in drives:
        drive.left = 0
    assert twin.group.submit(KvFree((twin.seqs[0][0],)), 0).result().status is Status.SUCCESS


def test_a_group_is_handed_over_while_it_is_used(twin, drives):
    twin.group.hand_over(drives[0])
    twin.group.hand_over(drives[0])  # again: it is leaving already
    for _ in range(10):
        twin.attend()
    assert twin.group.wait_filled(FILLED_S)
    assert {drive.name for drive in twin.group.drives} == {"b", "c"}
    assert drives[0].device.submit(KvRead((1,), 0), 0).result().status is Status.UNKNOWN_SEQUENCE
    assert [event.kind for event in twin.group.events] == ["redundant"]
    twin.read()


def test_hand_over_without_other_drive_keeps_group(small_drive, drives):
    group = ReplicatedDrive(drives[:1], Spares(drives[:1]))
    group.hand_over(drives[0])
    assert group.wait_filled(FILLED_S)
    assert group.drives == drives[:1]
    assert group.submit(Flush(), 0).result().status is Status.SUCCESS
    group.close()


def test_failed_search_for_replacement_drops_no_drive(small_drive, drives):
    def fail(lost, in_use):
        raise OSError("no table")

    group = ReplicatedDrive(drives[:2], fail)
    drives[0].left = 0
    group.submit(Flush(), 0).result()
    assert group.wait_filled(FILLED_S)
    assert [(event.kind, event.drive, event.reason) for event in group.events][-1] == ("failed", "a", "no table")
    assert group.drives == [drives[1]]
    group.close()


@pytest.mark.parametrize("first", [None, OSError("no table"), RuntimeError("a bug")], ids=str)
def test_later_replacement_is_filled(drives, monkeypatch, first):
    monkeypatch.setattr(replication, "RETRY_S", 0.0)
    answers = [first, first, drives[2]]

    def replacement(lost, in_use):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    group = ReplicatedDrive(drives[:2], replacement)
    drives[0].left = 0
    while answers:
        assert group.submit(Flush(), 0).result().status is Status.SUCCESS
        assert group.wait_filled(FILLED_S)
    assert group.drives == drives[1:3]
    reason = str(first or "no drive is free to replace it")
    assert [(event.kind, event.reason) for event in group.events if event.kind == "failed"] == [("failed", reason)]
    group.close()


def test_losing_both_drives_ends_with_path_lost(drives):
    group = ReplicatedDrive(drives[:2], lambda lost, in_use: None)
    for drive in drives[:2]:
        drive.left = 0
    assert group.submit(Flush(), 0).result().status is Status.PATH_LOST
    assert group.wait_filled(FILLED_S)
    group.close()


def test_drive_frees_stored_rows_after_a_fault(twin, drives):
    drives[1].left, drives[1].status, drives[1].faults = 0, Status.CAPACITY_EXCEEDED, 1
    twin.append(twin.seqs[0], 8)
    assert twin.group.wait_filled(FILLED_S)
    assert [drive.name for drive in twin.group.drives] == ["a", "c"]
    assert drives[1].device.submit(KvRead((1,), 0), 0).result().status is Status.UNKNOWN_SEQUENCE


def test_follower_backlog_is_bounded(drives):
    class Deferring(FailingDevice):
        """Completions come when they are waited for."""

        def submit(self, command, submit_ns):
            future = super().submit(command, submit_ns)
            return Deferred(future.result)

    slow = Deferring(drives[0].spec, "slow")
    group = ReplicatedDrive([drives[0], slow])
    row, one = np.ones((1, H, D), np.float16), np.array([1])
    seqs = tuple(group.submit(SeqCreate(1, 1, H, D, 512), 0).result().data[0].tolist())
    for _ in range(3 * MAX_PENDING):
        group.submit(KvAppend(seqs, 0, one, row, row), 0).result()
        assert len(group._live[1].pending) <= MAX_PENDING
    group.close()
    slow.close()


def test_a_mirror_counts_the_link_bytes_of_both_drives(twin, drives):
    single = ReplicatedDrive([drives[6]])
    rows = twin.values(8, H, D)
    create = SeqCreate(1, LAYERS, H, D, 64)
    done = []
    for group in (single, twin.group):
        seqs = tuple(group.submit(create, 0).result().data[0].tolist())
        done.append(group.submit(KvAppend(seqs, 0, np.array([8]), rows, rows), 0).result())
    assert done[1].link_bytes == 2 * done[0].link_bytes
    single.close()


def test_a_failed_replacement_is_followed_by_another_one(twin, drives):
    drives[2].left, drives[2].status = 2, Status.WRITE_FAULT
    drives[0].left = 0
    twin.attend()
    assert twin.group.wait_filled(FILLED_S)
    assert [drive.name for drive in twin.group.drives] == ["b", "d"]
    assert [(event.kind, event.drive) for event in twin.group.events if event.kind == "failed"] == [("failed", "c")]
    drives[1].left = 0
    twin.read()


def test_the_faster_drive_becomes_the_reader(small_drive, drives):
    slow = FailingDevice(replace(small_drive, link=replace(small_drive.link, command_ns=10**7)), "slow")
    slow.device.submit(SeqCreate(1, LAYERS, H, D, 512), 0)  # its handles are others
    group = ReplicatedDrive([slow, drives[0]])
    seqs = tuple(group.submit(SeqCreate(1, 1, H, D, 64), 0).result().data[0].tolist())
    row, one = np.ones((1, H, D), np.float16), np.array([1])
    now_ns = 0
    for _ in range(4):
        q = np.ones((1, H, G, D), np.float16)
        done = group.submit(Attend(seqs, 0, q, row, row, "dense", 4, one, one), now_ns).result()
        assert done.status is Status.SUCCESS
        now_ns = done.finish_ns
    assert group.drives[0] is drives[0]
    assert done.latency_ns < 10**7
    group.close()
    slow.close()


def test_prefixes_by_key_are_refused(twin):
    done = twin.group.submit(KvExist(np.zeros(1, KEY)), 0).result()
    assert (done.status, done.reason) == (Status.INVALID_OPCODE, "KvExist: prefixes have no redundancy")
