"""A tenant uses at most its share of a drive, independent of other tenants."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_firmware.tenants import Tenant
from csd_spec import (
    Attend,
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
    SeqSweep,
    Status,
)
from csd_spec.arrays import KEY

H, D = 2, 16
FEW = 64  # sequences of a drive


@pytest.fixture(autouse=True)
def few_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ftl.flash.tag", "csd_firmware.quotas"):
        monkeypatch.setattr(f"{module}.MAX_OWNERS", 2 * FEW)


class Drive:
    """A drive with two tenants."""

    def __init__(self, spec: DriveSpec, share: float = 0.5) -> None:
        self.share = share
        self.open(Firmware(spec))

    def open(self, firmware: Firmware) -> None:
        self.firmware = firmware
        self.alice, self.bob = (Tenant(firmware, b"secret", name, self.share) for name in ("alice", "bob"))


def made(done: Completion) -> tuple[int, ...]:
    assert done.status is Status.SUCCESS, done.reason
    return tuple(done.data[0].tolist())


def refused(done: Completion, what: str) -> None:
    assert done.status is Status.CAPACITY_EXCEEDED
    assert re.fullmatch(
        rf"[\d,]+ more {what}: tenant alice uses [\d,]+ of its quota of [\d,]+ \(\d+% .*\)", done.reason
    )


def rows(tokens: int) -> Any:
    return np.ones((tokens, H, D), np.float16)


def append(tenant: Tenant, seqs: tuple[int, ...], tokens: int) -> Completion:
    lengths = np.full(len(seqs), tokens)
    return tenant.step(KvAppend(seqs, 0, lengths, rows(tokens * len(seqs)), rows(tokens * len(seqs))), 0)


def create(count: int) -> SeqCreate:
    return SeqCreate(count, 1, H, D, 256)


def test_forks_count_against_own_tenant_only(small_drive: DriveSpec) -> None:
    drive = Drive(small_drive)
    seqs = made(drive.alice.step(create(1), 0))
    while len(seqs) < FEW // 2:
        seqs += made(drive.alice.step(SeqFork(seqs, np.zeros(len(seqs), np.int64)), 0))
    refused(drive.alice.step(SeqFork(seqs[:1], np.zeros(1, np.int64)), 0), "sequences")
    refused(drive.alice.step(create(1), 0), "sequences")
    refused(drive.alice.step(create(1 << 15), 0), "sequences")
    made(drive.bob.step(create(FEW // 2), 0))
    made(drive.alice.step(SeqSweep(), 0))
    assert len(made(drive.alice.step(create(FEW // 2), 0))) == FEW // 2


def test_pages_and_buffers_are_bounded_by_tokens(small_drive: DriveSpec) -> None:
    drive = Drive(replace(small_drive, dram_bytes=64 * 512 * 2))
    seqs = made(drive.alice.step(create(20), 0))
    refused(append(drive.alice, seqs, 1), "group buffers in DRAM")
    assert append(drive.alice, seqs[:8], 1).status is Status.SUCCESS
    row, one = rows(1)[:, :, None], np.ones(1, np.int64)
    while (done := append(drive.alice, seqs[:1], 32)).status is Status.SUCCESS:
        his = made(drive.bob.step(create(1), 0))
        assert append(drive.bob, his, 16).status is Status.SUCCESS
        drive.bob.step(KvFree(his), 0)
    refused(done, "flash pages")
    before = drive.firmware.ftl.kv.usage.of(drive.alice._label).pages
    refused(drive.alice.step(SeqFork(seqs[:1], np.array([1 << 20])), 0), "flash pages")
    assert drive.firmware.ftl.kv.usage.of(drive.alice._label).pages == before
    made(drive.alice.step(SeqFork(seqs[:1], np.array([0])), 0))
    for _ in range(64):  # the step at which a group is full
        done = drive.alice.step(Attend(seqs[:1], 0, row, rows(1), rows(1), "dense", 1, one, one), 0)
        if done.status is not Status.SUCCESS:
            break
    refused(done, "flash pages")
    drive.alice.step(KvCrop(seqs[:1], 0, np.array([16])), 0)
    assert append(drive.alice, seqs[:1], 32).status is Status.SUCCESS


def test_crop_that_reopens_groups_counts_buffers(small_drive: DriveSpec) -> None:
    """A crop inside a group moves its rows back to a buffer in DRAM."""
    drive = Drive(replace(small_drive, dram_bytes=16 * 512 * 2))
    seqs = made(drive.alice.step(create(5), 0))
    assert append(drive.alice, seqs, 16).status is Status.SUCCESS
    refused(drive.alice.step(KvCrop(seqs, 0, np.full(5, 3)), 0), "group buffers in DRAM")
    assert [int(sequence.lengths[0]) for sequence in drive.firmware.ftl.sequences.values()] == [16] * 5
    assert drive.alice.step(KvCrop(seqs[:3], 0, np.full(3, 3)), 0).status is Status.SUCCESS


def test_tables_in_dram_are_bounded_for_creates_and_forks(small_drive: DriveSpec) -> None:
    drive = Drive(small_drive)
    big = SeqCreate(1, 48, 64, 16, 256)
    seqs = made(drive.alice.step(big, 0))
    refused(drive.alice.step(replace(big, count=2), 0), "bytes of tables in DRAM")
    refused(drive.alice.step(SeqFork(seqs, np.zeros(1, np.int64)), 0), "bytes of tables in DRAM")
    assert made(drive.bob.step(big, 0))


def test_fork_checks_dram_of_tables(small_drive: DriveSpec) -> None:
    tenant = Tenant(Firmware(small_drive), b"secret")
    seqs = made(tenant.step(SeqCreate(2, 48, 64, 16, 256), 0))
    done = tenant.step(SeqFork(seqs, np.zeros(2, np.int64)), 0)
    assert done.status is Status.CAPACITY_EXCEEDED and "tables" in done.reason


def test_keys_are_bounded_and_moved_key_counts_once(small_drive: DriveSpec) -> None:
    limit = small_drive.dram_bytes // 4 // 64 // 2
    drive = Drive(small_drive)
    seqs = made(drive.alice.step(create(2), 0))
    assert append(drive.alice, seqs, 1).status is Status.SUCCESS
    keys = np.arange(2 * (limit + 1), dtype=np.uint64).view(KEY)
    ones = np.ones(limit + 1, np.int64)
    refused(drive.alice.step(KvName(seqs[:1], ones, keys), 0), "names")
    assert not drive.firmware.ftl.kv.names.count
    for seq in seqs:
        made_of = drive.alice.step(KvName((seq,), ones[1:], keys[1:]), 0)
        assert made_of.status is Status.SUCCESS, made_of.reason
    refused(drive.alice.step(KvName(seqs[:1], ones[:1], keys[:1]), 0), "names")
    drive.alice.step(KvDrop(keys[1:2]), 0)
    assert drive.alice.step(KvName(seqs[:1], ones[:1], keys[:1]), 0).status is Status.SUCCESS


def test_quotas_hold_after_power_on(small_drive: DriveSpec) -> None:
    drive = Drive(small_drive)
    seqs = made(drive.alice.step(create(FEW // 2), 0))
    assert append(drive.alice, seqs[:1], 40).status is Status.SUCCESS
    drive.alice.step(Flush(), 0)
    used = drive.firmware.ftl.kv.usage.of(drive.alice._label)
    drive.open(Firmware(small_drive, drive.firmware.ftl.nand))
    assert drive.firmware.ftl.kv.usage.of(drive.alice._label) == used
    refused(drive.alice.step(create(1), 0), "sequences")
    drive.alice.step(KvFree(seqs[:1]), 0)
    made(drive.alice.step(create(1), 0))


def test_only_tenant_gets_whole_drive(small_drive: DriveSpec) -> None:
    tenant = Tenant(Firmware(small_drive), b"secret", "alice", 1.0)
    assert len(made(tenant.step(create(FEW), 0))) == FEW


def test_tenant_share_is_fraction_of_drive(small_drive: DriveSpec) -> None:
    drive = Drive(small_drive, share=0.25)
    made(drive.alice.step(create(FEW // 4), 0))
    refused(drive.alice.step(create(1), 0), "sequences")
