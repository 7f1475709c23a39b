"""Forks, names and ranges of many sequences, across power loss, tenants and drives that die.

partner of: csd_firmware/objects.py, ftl/kv/prefix_index.py, csd_link/recovery.py
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_firmware.tenants import Tenant
from csd_link.recovery import RecoveringDrive
from csd_spec import (
    LAYOUTS,
    Attend,
    Completion,
    DriveSpec,
    Flush,
    KvAppend,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvGather,
    KvList,
    KvName,
    KvRead,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.arrays import key_list, keys_of
from ftl import OutOfSpaceError
from ftl.kv.prefix_index import PrefixIndex

LAYERS, H, D = 2, 2, 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def one(count: int):  # type: ignore[no-untyped-def]
    return np.array([count])


class Drive:
    """A firmware, and its state after a power loss."""

    def __init__(self, spec: DriveSpec) -> None:
        self.spec, self.firmware, self.draw = spec, Firmware(spec), np.random.default_rng(0)
        self.tenant = Tenant(self.firmware, b"s" * 32, "alice")

    def do(self, command, status: Status = Status.SUCCESS) -> Completion:  # type: ignore[no-untyped-def]
        done = self.tenant.step(command, 0)
        assert done.status is status, done.reason
        return done

    def rows(self, count: int):  # type: ignore[no-untyped-def]
        return self.draw.standard_normal((count, H, D)).astype(np.float16)

    def make(self, tokens: int):  # type: ignore[no-untyped-def]
        """A sequence, and its rows by layer."""
        seq = int(self.do(SeqCreate(1, LAYERS, H, D, 512)).data[0][0])
        rows = [(self.rows(tokens), self.rows(tokens)) for _ in range(LAYERS)]
        for layer, (k, v) in enumerate(rows):
            self.do(KvAppend((seq,), layer, one(tokens), k, v))
        return seq, rows

    def holds(self, seq: int, rows) -> bool:  # type: ignore[no-untyped-def]
        read = [self.do(KvRead((seq,), layer)).data for layer in range(LAYERS)]
        return all(
            np.array_equal(a, b)
            for array, wanted in zip(read, rows, strict=True)
            for a, b in zip(array, wanted, strict=True)
        )

    def lose_power(self) -> None:
        self.firmware = Firmware(self.spec, self.firmware.ftl.nand)
        self.tenant = Tenant(self.firmware, b"s" * 32, "alice")


@pytest.fixture
def drive(small_drive: DriveSpec) -> Drive:
    return Drive(small_drive)


@pytest.mark.parametrize("length", [1, 16, 23, 40, 500])
def test_fork_shares_prefix_then_diverges(drive: Drive, length: int) -> None:
    seq, rows = drive.make(40)
    child = int(drive.do(SeqFork((seq,), one(length))).data[0][0])
    prefix = [(k[:length], v[:length]) for k, v in rows]
    assert drive.holds(child, prefix)
    more = drive.rows(30)
    drive.do(KvAppend((child,), 0, one(30), more, more))
    grown = [tuple(np.concatenate([part, more]) for part in prefix[0]), prefix[1]]
    assert drive.holds(child, grown) and drive.holds(seq, rows)
    drive.do(KvFree((seq,)))
    assert drive.holds(child, grown)
    q, k = np.ones((1, H, 2, D), np.float16), np.ones((1, H, D), np.float16)
    fresh = int(drive.do(SeqCreate(1, LAYERS, H, D, 512)).data[0][0])
    drive.do(KvAppend((fresh,), 0, one(len(grown[0][0])), *grown[0]))
    both = [drive.do(Attend((handle,), 0, q, k, k, "sparf", 4, one(8), one(2))).data for handle in (child, fresh)]
    assert all(np.array_equal(a, b) for a, b in zip(*both, strict=True))  # the mean of V too
    drive.do(Flush())
    drive.lose_power()
    assert drive.holds(child, [tuple(np.concatenate([p, k]) for p in grown[0]), grown[1]])


def test_fork_without_space_changes_nothing(drive: Drive) -> None:
    seqs = [drive.make(33)[0] for _ in range(2)]
    before = len(drive.firmware.ftl.sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftl.flash.tag.MAX_OWNERS", 2 * before + 2)
        done = drive.do(SeqFork(tuple(seqs), np.array([33, 33])), Status.CAPACITY_EXCEEDED)
    assert "sequences" in done.reason and len(drive.firmware.ftl.sequences) == before


def test_key_is_found_until_its_tokens_are_removed(drive: Drive) -> None:
    seq, rows = drive.make(40)
    drive.do(KvName((seq,), np.array([8, 16, 40]), keys_of([key(3), key(1), key(2)])))
    handles, tokens = drive.do(KvExist(keys_of([key(3), key(1), key(9), key(2)]))).data
    assert handles.tolist() == [seq, seq, 0, 0] and tokens.tolist() == [8, 16, 0, 0]
    keys, handles, tokens = drive.do(KvList(keys_of([key(1)]), 3)).data
    assert key_list(keys) == [key(2), key(3), bytes(16)] and tokens.tolist() == [40, 8, 0]
    drive.do(Flush())
    drive.do(KvName((seq,), one(5), keys_of([key(4)])))
    drive.lose_power()
    assert drive.do(KvExist(keys_of([key(1)]))).data[1].tolist() == [16]
    assert drive.do(KvExist(keys_of([key(4)]))).data[1].tolist() == [0]  # not flushed
    drive.do(KvCrop((seq,), 1, one(10)))
    assert drive.do(KvList(keys_of([bytes(16)]), 4)).data[2].tolist() == [8, 0, 0, 0]
    other, _ = drive.make(20)
    drive.do(KvName((other,), one(20), keys_of([key(3)])))  # moves
    assert drive.do(KvExist(keys_of([key(3)]))).data[0].tolist() == [other]
    drive.do(KvDrop(keys_of([key(3), key(77)])))
    drive.do(Flush())
    drive.lose_power()
    assert drive.do(KvExist(keys_of([key(3)]))).data[1].tolist() == [0]
    drive.do(KvName((other,), one(20), keys_of([key(5)])))
    drive.do(KvFree((other,)))
    assert drive.do(KvExist(keys_of([key(5)]))).data[1].tolist() == [0]
    assert drive.holds(seq, [rows[0], tuple(part[:10] for part in rows[1])])


def test_keys_are_invisible_to_other_tenants(drive: Drive) -> None:
    seq, _ = drive.make(20)
    bob = Tenant(drive.firmware, b"s" * 32, "bob")
    drive.do(KvName((seq,), one(20), keys_of([key(1)])))
    assert bob.step(KvExist(keys_of([key(1)])), 0).data[1].tolist() == [0]
    assert bob.step(KvList(keys_of([bytes(16)]), 2), 0).data[2].tolist() == [0, 0]
    bob.step(KvDrop(keys_of([key(1)])), 0)
    assert drive.do(KvExist(keys_of([key(1)]))).data[0].tolist() == [seq]
    assert bob.step(KvName((seq,), one(20), keys_of([key(2)])), 0).status is Status.UNKNOWN_SEQUENCE


def test_gather_reads_ranges_of_sequences_and_layers(drive: Drive) -> None:
    sequences = [drive.make(40), drive.make(30)]
    ranges = [(3, 20), (10, 7)]
    pairs = list(zip(sequences, ranges, strict=True))
    command = KvGather(tuple(seq for seq, _ in sequences), *np.array(ranges).T.copy(), 0, LAYERS)
    k, v = drive.do(command).data
    for i, gathered in enumerate((k, v)):
        wanted = [
            np.concatenate([rows[layer][i][first : first + count] for (_, rows), (first, count) in pairs])
            for layer in range(LAYERS)
        ]
        assert np.array_equal(gathered, np.stack(wanted))
    alone = drive.do(replace(command, layer=1, layers=1)).data
    assert np.array_equal(alone[0][0], k[1])


def test_sweep_frees_unnamed_sequences_of_one_tenant(drive: Drive) -> None:
    named, rows = drive.make(20)
    drive.make(10)
    bob = Tenant(drive.firmware, b"s" * 32, "bob")
    his = tuple(bob.step(SeqCreate(1, 1, H, D, 64), 0).data[0].tolist())
    drive.do(KvName((named,), one(20), keys_of([key(1)])))
    assert drive.do(SeqSweep()).data[0].tolist() == [1]
    assert drive.do(SeqSweep()).data[0].tolist() == [0]
    assert drive.holds(named, rows)
    assert bob.step(KvFree(his), 0).status is Status.SUCCESS


def test_missing_ranges_and_keys_are_refused(drive: Drive) -> None:
    seq, _ = drive.make(20)
    other, _ = drive.make(5)
    for command, says in (
        (KvGather((seq,), one(10), one(11), 0, 1), "a range ends at 21"),
        (KvGather((seq,), one(10), one(0), 0, 1), "a range is empty"),
        (KvGather((seq,), one(0), one(1), 1, 2), "layers = 2"),
        (KvName((seq,), one(21), keys_of([key(1)])), "tokens from 21 to 21"),
        (KvName((seq,), one(0), keys_of([key(1)])), "tokens from 0 to 0"),
        (KvName((seq, other), one(1), keys_of([key(1)])), "must be exactly one sequence"),
        (KvList(keys_of([key(1)]), 0), "count = 0"),
    ):
        assert says in drive.do(command, Status.INVALID_FIELD).reason
    many = keys_of(key(i) for i in range(drive.spec.dram_bytes // 256 + 1))
    done = drive.do(KvName((seq,), np.ones(many.size, np.int64), many), Status.CAPACITY_EXCEEDED)
    assert "drive DRAM has room for" in done.reason


def test_opaque_values_round_trip_and_are_not_attended(drive: Drive) -> None:
    seq = int(drive.do(SeqCreate(1, LAYERS, H, D, 512, 2)).data[0][0])
    rows = drive.draw.integers(0, 1 << 16, (50, H, D)).astype(np.uint16).view(np.float16)  # BF16, say; some are no FP16
    for layer in range(LAYERS):
        drive.do(KvAppend((seq,), layer, one(50), rows, rows))
    q, k = np.ones((1, H, 2, D), np.float16), np.ones((1, H, D), np.float16)
    done = drive.do(Attend((seq,), 0, q, k, k, "dense", 4, one(8), one(2)), Status.INVALID_FIELD)
    assert "opaque" in done.reason
    child = int(drive.do(SeqFork((seq,), one(21))).data[0][0])
    drive.do(KvAppend((child,), 0, one(9), rows[:9], rows[:9]))
    drive.do(Flush())
    drive.lose_power()
    gathered = drive.do(KvGather((seq, child), np.array([0, 0]), np.array([50, 21]), 0, LAYERS)).data
    for part in gathered:
        assert np.array_equal(part.view(np.uint16)[1], np.concatenate([rows, rows[:21]]).view(np.uint16))
    assert np.array_equal(drive.do(KvRead((child,), 0)).data[0][21:].view(np.uint16), rows[:9].view(np.uint16))
    assert all(sequence.v_sums is None for sequence in drive.firmware.ftl.sequences.values())


def test_attention_without_copy_of_k_is_equal(drive: Drive) -> None:
    rows, q = drive.rows(60), drive.rows(4).reshape(1, H, 2, 2 * D)[..., :D].copy()
    outputs = []
    for layout in (16, 1):
        seq = int(drive.do(SeqCreate(1, 1, H, D, 512, layout)).data[0][0])
        drive.do(KvAppend((seq,), 0, one(60), rows, rows))
        outputs.append(drive.do(Attend((seq,), 0, q, rows[:1], rows[:1], "dense", 4, one(8), one(2))).data)
        assert len([*drive.firmware.ftl.sequences.values()][-1].maps) == (3 if layout == 16 else 2)
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))


def test_key_index_stays_sorted() -> None:
    draw, names, alive = random.Random(1), PrefixIndex(), {}
    seqs = [SimpleNamespace(handle=i, label=i % 2, names={}, failed=False) for i in range(6)]
    for _ in range(600):
        seq, keys = draw.choice(seqs), [key(draw.randrange(40)) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.6:
            tokens = [draw.randint(1, 9) for _ in keys]
            names.bind(seq, keys, tokens)  # type: ignore[arg-type]
            alive |= {(seq.label, each): (seq.handle, count) for each, count in zip(keys, tokens, strict=True)}
        elif draw.random() < 0.5:
            names.unbind(seq.label, keys)
            for each in keys:
                alive.pop((seq.label, each), None)
        else:
            names.crop(seq, 4)  # type: ignore[arg-type]
            alive = {at: place for at, place in alive.items() if place[0] != seq.handle or place[1] <= 4}
        for label in range(2):
            wanted = sorted((each, place) for (owner, each), place in alive.items() if owner == label)
            assert names.list_after(label, b"", 99) == wanted
            assert all(names.find(label, [each]) == [place] for each, place in wanted)
    assert names.count == len(alive)


class KilledDrive:
    """A drive attached through a connection; after a kill it restarts with its flushed state.

    Attributes:
        killed_in: Commands until the kill, the last one included; negative: none.
        executes_last: Whether that last command is executed before the kill.
    """

    def __init__(self, spec: DriveSpec) -> None:
        self.spec, self.name, self.lost = spec, "csd0", None
        self.identity = SimpleNamespace(restarts=True)
        self.firmware, self.kept = Firmware(spec), Firmware(spec).ftl.nand
        self.killed_in, self.executes_last, self.dead = -1, False, False

    def connect(self) -> KilledDrive:
        self.dead = False
        return self

    def submit(self, command, submit_ns: int):  # type: ignore[no-untyped-def]
        done = Future[Completion]()
        self.killed_in -= not self.dead
        completion = (
            None
            if self.dead or (self.killed_in == 0 and not self.executes_last)
            else self.firmware.step(command, submit_ns)
        )
        if completion and isinstance(command, Flush) and completion.status is Status.SUCCESS:
            self.kept = self.firmware.ftl.nand.copy()
        if self.killed_in == 0 and not self.dead:
            self.firmware, self.dead = Firmware(self.spec, self.kept.copy()), True
        if self.dead:
            completion = Completion(status=Status.PATH_LOST, reason="died", submit_ns=submit_ns, finish_ns=submit_ns)
        done.set_result(completion)
        return done

    def close(self) -> None:
        pass


@pytest.mark.parametrize("ends", ["free", "crop"])
def test_moved_key_is_not_restored_to_old_sequence(small_drive: DriveSpec, ends: str) -> None:
    """A kill brings back the flushed key of the first sequence, which the key left for the second."""
    killed = KilledDrive(small_drive)
    device = RecoveringDrive(killed.connect)  # type: ignore[arg-type]

    def do(command):  # type: ignore[no-untyped-def]
        done = device.submit(command, 0).result()
        assert done.status is Status.SUCCESS, done.reason
        return done

    first, second = do(SeqCreate(2, 1, H, D, 256)).data[0].tolist()
    rows = np.ones((40, H, D), np.float16)
    do(KvAppend((first, second), 0, np.array([20, 20]), rows, rows))
    do(KvName((first,), one(20), keys_of([key(1)])))
    do(Flush())
    do(KvName((second,), one(20), keys_of([key(1)])))
    do(KvFree((second,)) if ends == "free" else KvCrop((second,), 0, one(5)))
    killed.killed_in = 1
    handles, tokens = do(KvExist(keys_of([key(1)]))).data
    assert (int(handles[0]), int(tokens[0])) == (0, 0)


def test_cropped_rounded_rows_survive_restart(small_drive: DriveSpec) -> None:
    """A crop opens a full group, whose rows are rounded by then."""
    killed = KilledDrive(small_drive)
    device = RecoveringDrive(killed.connect)  # type: ignore[arg-type]
    create = SeqCreate(1, 1, H, D, 256, LAYOUTS["progressive"].code)
    (seq,) = device.submit(create, 0).result().data[0].tolist()
    rows = np.random.default_rng(0).standard_normal((60, H, D)).astype(np.float16)
    device.submit(KvAppend((seq,), 0, one(60), rows, rows), 0).result()
    device.submit(KvCrop((seq,), 0, one(20)), 0).result()
    before = device.submit(KvRead((seq,), 0), 0).result().data[0]
    killed.killed_in = 1
    after = device.submit(KvRead((seq,), 0), 0).result().data[0]
    assert killed.killed_in < 0 and not np.array_equal(before, rows[:20])
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("seed", range(8))
def test_killed_drive_recovers_rows_and_keys(small_drive: DriveSpec, seed: int) -> None:
    """Rows and names against dictionaries, with a kill before or after any command."""
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    killed = KilledDrive(small_drive)
    device = RecoveringDrive(killed.connect)  # type: ignore[arg-type]
    rows: dict[int, list[np.ndarray]] = {}
    names: dict[bytes, tuple[int, int]] = {}

    def do(command):  # type: ignore[no-untyped-def]
        if draw.random() < 0.1:
            killed.killed_in, killed.executes_last = draw.choice((1, 2, 3)), draw.random() < 0.5
        done = device.submit(command, 0).result()
        assert done.status is Status.SUCCESS, done.reason
        return done

    for _ in range(120):
        seq = draw.choice([*rows]) if rows else None
        match draw.choice(
            ("make", "append", "append", "fork", "name", "name", "drop", "crop", "free", "flush", "find")
        ):
            case "make" if len(rows) < 4:
                rows[int(do(SeqCreate(1, 1, H, D, 256)).data[0][0])] = [np.zeros((0, H, D), np.float16)]
            case "append" if seq:
                new = generator.standard_normal((draw.randint(1, 20), H, D)).astype(np.float16)
                do(KvAppend((seq,), 0, one(len(new)), new, new))
                rows[seq] = [np.concatenate([*rows[seq], new])]
            case "fork" if seq and len(rows) < 6:
                length = draw.randint(0, 60)
                rows[int(do(SeqFork((seq,), one(length))).data[0][0])] = [rows[seq][0][:length]]
            case "name" if seq and len(rows[seq][0]):
                which, tokens = key(draw.randrange(9)), draw.randint(1, len(rows[seq][0]))
                do(KvName((seq,), one(tokens), keys_of([which])))
                names[which] = (seq, tokens)
            case "drop":
                which = key(draw.randrange(9))
                do(KvDrop(keys_of([which])))
                names.pop(which, None)
            case "crop" if seq:
                length = draw.randint(0, 60)
                do(KvCrop((seq,), 0, one(length)))
                rows[seq] = [rows[seq][0][:length]]
                names = {each: name for each, name in names.items() if name[0] != seq or name[1] <= length}
            case "free" if len(rows) > 3 and seq:
                do(KvFree((seq,)))
                del rows[seq]
                names = {each: name for each, name in names.items() if name[0] != seq}
            case "flush":
                do(Flush())
            case "find":
                for number in range(9):
                    handles, tokens = do(KvExist(keys_of([key(number)]))).data
                    assert (int(handles[0]), int(tokens[0])) == names.get(key(number), (0, 0))
        for each, (wanted,) in rows.items():
            assert np.array_equal(do(KvRead((each,), 0)).data[0], wanted)
    assert device.recoveries
    device.close()


def test_keys_fill_their_dram_share_exactly(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csd_firmware.objects.NAME_BYTES", drive.spec.dram_bytes // 4 // 4)
    seq, _ = drive.make(40)
    for number in range(4):
        drive.do(KvName((seq,), one(7), keys_of([key(number)])))
    drive.do(KvName((seq,), one(7), keys_of([key(5)])), Status.CAPACITY_EXCEEDED)


def test_partly_failed_fork_leaves_no_tables(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    seqs = tuple(drive.make(40)[0] for _ in range(2))
    state = drive.firmware.state
    before, crop = set(state.v_sums), state.ftl.crop
    crops = iter([crop, crop])

    def crop_twice(*args: object) -> int:
        if (next_crop := next(crops, None)) is None:
            raise OutOfSpaceError("no room")
        return int(next_crop(*args))  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(state.ftl, "crop", crop_twice)
    drive.do(SeqFork(seqs, np.array([5, 5])), Status.CAPACITY_EXCEEDED)
    assert set(state.v_sums) == before == set(state.ftl.sequences)
