"""Decode steps fused into one compiled call, and steps run by their method: compared with a firmware that drops its
plans.
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import Firmware, attend, fused
from csd_firmware.check import NO_LIMIT
from csd_io.folder import DiskFolder
from csd_io.medium import Medium
from csd_spec import LAYOUTS, Attend, KvAppend, KvRead, SeqCreate, Status
from ftl import FaultPlan, Nand
from ftl.flash.files import NandFiles
from tests.csd_firmware.test_cached_plans import LAYERS, D, G, H, Twins

BEGUN = 5  # tokens of each sequence: its group is begun, and far from full


@pytest.fixture
def taken(monkeypatch):
    """Steps of the firmware with plans that were one compiled call."""
    steps, run = [], fused.FusedStep.run

    def counted(self, state, command):
        data = run(self, state, command)
        steps.extend([command] * (data is not None))
        return data

    monkeypatch.setattr(fused.FusedStep, "run", counted)
    return steps


def twins_of(drive, count=2, faults=None, bits=16):
    twins = Twins(drive, 0, faults)
    twins.create(count, bits)
    seqs = tuple(twins.lengths)
    rows = twins.half(count * BEGUN, H, D)
    twins.do(KvAppend(seqs, 0, np.full(count, BEGUN), rows, -rows))
    for handle in seqs:
        twins.lengths[handle][0] = BEGUN
    return twins, seqs


def step_of(twins, seqs, **fields):
    """A valid step of these sequences, except for the given fields."""
    B, every = len(seqs), np.array([twins.lengths[handle][0] + 1 for handle in seqs])
    good = Attend(seqs, 0, twins.half(B, H, G, D), twins.half(B, H, D), twins.half(B, H, D), "dense", 4, every, every)
    return replace(good, **fields)


def test_steps_are_fused_until_a_group_is_full(small_drive, taken):
    twins, seqs = twins_of(small_drive)
    per_group = min(mapped.per_group for mapped in twins.both[0].ftl.sequences[seqs[0]].maps.values())
    for _ in range(per_group):
        assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS
    assert len(taken) == per_group - 2  # not the one that fills the group, not the one that begins the next
    twins.equal()


def test_bf16_steps_are_fused(small_drive, taken):
    twins, seqs = twins_of(small_drive, bits=LAYOUTS["bf16"].code)
    for _ in range(4):
        assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS
    assert len(taken) == 4
    infinite = np.uint16(0x7F80).view(np.float16)
    assert twins.do(WRONG["infinity in K"](step_of(twins, seqs))).status is Status.SUCCESS, "FP16's is a BF16"
    twins.lengths = {handle: [length + 1, *rest] for handle, (length, *rest) in twins.lengths.items()}
    good = step_of(twins, seqs)
    assert twins.do(replace(good, k=bad(good.k, infinite))).status is Status.INVALID_FIELD
    twins.equal()


def test_sparse_steps_are_not_fused(small_drive, taken):
    twins, seqs = twins_of(small_drive)
    for method in ("sparf", "dense", "sparf", "dense", "dense"):
        assert twins.attend(seqs, 0, method).status is Status.SUCCESS
    assert [command.method for command in taken] == ["dense"] * 3
    twins.equal()


def bad(array, value):
    array = array.copy()
    array.flat[-1] = value
    return array


WRONG = {
    "NaN in q": lambda good: replace(good, q=bad(good.q, np.nan)),
    "infinity in K": lambda good: replace(good, k=bad(good.k, np.inf)),
    "NaN in V": lambda good: replace(good, v=bad(good.v, np.nan)),
    "top_k of 0": lambda good: replace(good, top_k=bad(good.top_k, 0)),
    "top_k beyond all tokens": lambda good: replace(good, top_k=good.top_k + 1),
    "recent below 0": lambda good: replace(good, recent=bad(good.recent, -1)),
    "recent beyond top_k": lambda good: replace(good, recent=good.top_k + 1),
    "r beyond d": lambda good: replace(good, r=D + 1),
    "a method that is no name": lambda good: replace(good, method=np.ones(2)),
    "another method": lambda good: replace(good, method="densest"),
    "q of another shape": lambda good: replace(good, q=good.q[:, :, :, :-1].copy()),
    "K as FP32": lambda good: replace(good, k=good.k.astype(np.float32)),
    "V that is not contiguous": lambda good: replace(good, v=np.asfortranarray(good.v)),
    "counts of 32 bits": lambda good: replace(good, top_k=good.top_k.astype(np.int32)),
    "q that is no array": lambda good: replace(good, q=good.q.tolist()),
    "recent that is no array": lambda good: replace(good, recent=1),
    "no V": lambda good: replace(good, v=None),
    "a cap of 0": lambda good: replace(good, terms=np.zeros((H, G, 4), np.float32)),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_fused_step_is_refused_without_effect(small_drive, taken, what):
    twins, seqs = twins_of(small_drive)
    for _ in range(2):
        twins.attend(seqs, 0, "dense")
    assert len(taken) == 2
    done = twins.do(WRONG[what](step_of(twins, seqs)))
    assert done.status is Status.INVALID_FIELD and len(taken) == 2
    assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS and len(taken) == 3
    twins.do(KvRead(seqs, 0))


@pytest.mark.parametrize("what", WRONG)
def test_invalid_step_of_other_methods_is_refused(small_drive, taken, what):
    twins, seqs = twins_of(small_drive)
    for _ in range(2):
        assert twins.attend(seqs, 0, "sparf").status is Status.SUCCESS
    assert twins.do(WRONG[what](step_of(twins, seqs, method="sparf"))).status is Status.INVALID_FIELD
    assert twins.attend(seqs, 0, "sparf").status is Status.SUCCESS and not taken
    twins.do(KvRead(seqs, 0))


def test_a_plan_is_built_once_an_epoch(small_drive, monkeypatch):
    built, build = [], attend.fused_step
    monkeypatch.setattr(attend, "fused_step", lambda *arguments: built.append(arguments) or build(*arguments))
    twins, seqs = twins_of(small_drive)
    for method in ("dense", "dense", "sparf", "sparf", "dense", "sparf"):
        twins.both[0].step(step_of(twins, seqs, method=method), 0)
        twins.lengths = {handle: [length + 1, *rest] for handle, (length, *rest) in twins.lengths.items()}
    assert [command.method for _, _, command in built] == ["dense", "sparf"]


def test_step_larger_than_window_slot_is_refused(small_drive, taken):
    twins, seqs = twins_of(small_drive)
    for _ in range(2):
        twins.attend(seqs, 0, "dense")
    firmware, command = twins.both[0], step_of(twins, seqs)
    nbytes = sum(part.nbytes for part in firmware.step(command, 0, max_bytes=NO_LIMIT).data)
    assert firmware.step(step_of(twins, seqs), 0, max_bytes=nbytes - 1).status is Status.INVALID_FIELD


def test_step_with_terms_is_not_fused(small_drive, taken):
    twins, seqs = twins_of(small_drive)
    terms = np.tile(np.array([0.25, 30, 1, 0], np.float32), (H, G, 1))
    for _ in range(3):
        assert twins.do(step_of(twins, seqs, terms=terms)).status is Status.SUCCESS
        for handle in seqs:
            twins.lengths[handle][0] += 1
    assert not taken
    twins.equal()


def test_worn_out_drive_rejects_fused_steps(small_drive, taken):
    twins, seqs = twins_of(small_drive)
    for _ in range(2):
        twins.attend(seqs, 0, "dense")
    for firmware in twins.both:
        firmware.ftl.nand.bad_blocks = small_drive.geometry.blocks
    assert twins.attend(seqs, 0, "dense").status is Status.READ_ONLY and len(taken) == 2


def test_batches_sharing_a_sequence_see_its_current_rows(small_drive, taken):
    twins, seqs = twins_of(small_drive, count=3)
    for some in (seqs, seqs[:1], seqs[1:], seqs, seqs[:1], seqs[1:], seqs):
        assert twins.attend(some, 0, "dense").status is Status.SUCCESS
    assert len(taken) == 7
    twins.equal()


def test_pages_with_bit_errors_use_slow_path(small_drive, taken):
    twins, seqs = twins_of(small_drive, faults=FaultPlan(raw_bit_errors=1e-6))
    for _ in range(3):
        assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS
    assert not taken


def test_pages_in_files_use_slow_path(small_drive, taken, tmp_path):
    """Their place in memory holds them only until the next command."""
    drive = replace(small_drive, geometry=replace(small_drive.geometry, page_bytes=4096))
    NandFiles.make(folder := DiskFolder(tmp_path), drive.geometry)
    nand = Nand(drive.geometry, folder=folder, medium=Medium("direct", 4096))
    firmware, beside = Firmware(drive, nand), Firmware(drive)
    rows = np.random.default_rng(0).standard_normal((400, H, D)).astype(np.float16)
    for each in (firmware, beside):
        seqs = tuple(each.step(SeqCreate(1, 1, H, D, 1024), 0).data[0].tolist())
        each.step(KvAppend(seqs, 0, np.array([400]), rows, -rows), 0)
    q = np.tile(rows[:1, :, None], (1, 1, G, 1))
    for step in range(3):
        count = np.array([401 + step])
        command = Attend(seqs, 0, q, rows[:1], rows[:1], "dense", 4, count, count)
        outs = [each.step(command, 0).data[0] for each in (firmware, beside)]
        np.testing.assert_array_equal(*outs)
    assert len(taken) == 3, "those of the drive beside it"
    nand.page_store.close()


def test_each_layer_has_its_own_cached_plan(small_drive, taken):
    twins, seqs = twins_of(small_drive)
    rows = twins.half(2 * BEGUN, H, D)
    twins.do(KvAppend(seqs, 1, np.full(2, BEGUN), rows, rows))
    for handle in seqs:
        twins.lengths[handle][1] = BEGUN
    for _ in range(4):
        for layer in range(LAYERS):
            assert twins.attend(seqs, layer, "dense").status is Status.SUCCESS
    assert len(taken) == 2 * 4
    twins.equal()


def test_read_only_arrays_compile_no_new_signature(small_drive, taken):
    twins, seqs = twins_of(small_drive)
    for _ in range(2):
        twins.attend(seqs, 0, "dense")
    before = list(fused._store_and_attend.signatures)
    command = step_of(twins, seqs)
    for array in (command.q, command.k, command.v, command.top_k, command.recent):
        array.setflags(write=False)
    assert twins.do(command).status is Status.SUCCESS
    assert len(taken) == 3 and fused._store_and_attend.signatures == before
