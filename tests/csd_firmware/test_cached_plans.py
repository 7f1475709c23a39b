"""Plans cached between steps of a drive change nothing: the same results if plans are dropped before each command."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from attention_engine import METHODS
from attention_engine.methods.dense import dense
from csd_firmware import Firmware
from csd_spec import LAYOUTS, Attend, Flush, KvAppend, KvCrop, KvFree, KvRead, SeqCreate, Status
from csd_spec.view import in_flash
from ftl import FaultPlan, Nand
from ftl.kv.map import MAX_PLANS

H, G, D, LAYERS = 2, 2, 16, 2
FP16_METHODS = ("dense", "sparf", "sparq", "h2o", "quest", "twilight", "oracle")


class Forgetful(Firmware):
    """It has no plan when a command comes, and leaves dense attention to the method."""

    def __init__(self, drive, nand):
        super().__init__(drive, nand, METHODS | {"dense": lambda step: dense(step)})

    def step(self, command, submit_ns, tenant=0, max_bytes=1 << 62):
        self.ftl.kv.invalidate_plans()
        return super().step(command, submit_ns, tenant, max_bytes)


class Twins:
    """A firmware and a forgetful one that get the same commands."""

    def __init__(self, drive, seed, faults=None):
        self.both = [kind(drive, Nand(drive.geometry, faults)) for kind in (Firmware, Forgetful)]
        self.generator, self.now_ns = np.random.default_rng(seed), 0
        self.lengths = {}  # of sequences, by layer

    def do(self, command):
        one, other = (firmware.step(command, self.now_ns) for firmware in self.both)
        for name in ("status", "reason", "submit_ns", "finish_ns", "breakdown_ns", "flash", "link_bytes"):
            assert getattr(one, name) == getattr(other, name), name
        assert [part.tobytes() for part in one.data] == [part.tobytes() for part in other.data]
        assert [part.dtype for part in one.data] == [part.dtype for part in other.data]
        self.now_ns = one.finish_ns
        return one

    def half(self, *shape):
        return self.generator.standard_normal(shape).astype(np.float16)

    def create(self, count, bits):
        for handle in self.do(SeqCreate(count, LAYERS, H, D, 2048, bits)).data[0].tolist():
            self.lengths[handle] = [0] * LAYERS

    def some(self):
        """A few of the sequences, in any order."""
        handles = list(self.lengths)
        return tuple(self.generator.permutation(handles)[: self.generator.integers(1, len(handles) + 1)].tolist())

    def append(self, seqs, layer, most):
        lengths = self.generator.integers(0, most, len(seqs))
        k, v = self.half(lengths.sum(), H, D), self.half(lengths.sum(), H, D)
        if self.do(KvAppend(seqs, layer, lengths, k, v)).status is Status.SUCCESS:
            for handle, length in zip(seqs, lengths.tolist(), strict=True):
                self.lengths[handle][layer] += length

    def attend(self, seqs, layer, method, good=True):
        B = len(seqs)
        stored = np.array([self.lengths[handle][layer] for handle in seqs]) + 1
        top_k = -(-stored // 3) if good else stored + 1
        q, k, v = self.half(B, H, G, D), self.half(B, H, D), self.half(B, H, D)
        done = self.do(Attend(seqs, layer, q, k, v, method, 4, top_k, -(-top_k // 4)))
        if done.status is Status.SUCCESS:
            for handle in seqs:
                self.lengths[handle][layer] += 1
        return done

    def crop(self, seqs, layer):
        lengths = [int(self.generator.integers(0, self.lengths[handle][layer] + 1)) for handle in seqs]
        if self.do(KvCrop(seqs, layer, np.array(lengths))).status is Status.SUCCESS:
            for handle, length in zip(seqs, lengths, strict=True):
                self.lengths[handle][layer] = length

    def free(self, handle):
        self.do(KvFree((handle,)))
        del self.lengths[handle]

    def equal(self):
        """Compare the complete state of both drives."""
        one, other = (firmware.ftl for firmware in self.both)
        assert one.counters == other.counters
        assert one.timing.idle_ns() == other.timing.idle_ns() and one.buffers.left == other.buffers.left
        assert (one.nand.content == other.nand.content).all() and (one.nand.spare == other.nand.spare).all()
        for handle, seq in one.sequences.items():
            theirs = other.sequences[handle]
            assert (seq.v_sums == theirs.v_sums).all() and (seq.lengths == theirs.lengths).all()
            for name, mapped in seq.maps.items():
                assert (mapped.slots == theirs.maps[name].slots).all()
                for own, its in zip(mapped.buffers.ravel(), theirs.maps[name].buffers.ravel(), strict=True):
                    assert (own < 0) == (its < 0)
                    assert own < 0 or (one.buffers.content[own] == other.buffers.content[its]).all()


def decode(twins, seqs, methods, steps):
    """Steps of a set of sequences over all layers, as a model makes them, so that groups fill on the way."""
    method = twins.generator.choice(methods)
    for _ in range(steps):
        for layer in range(LAYERS):
            twins.attend(seqs, layer, str(method))


def move(ftl, handle, layer, now_ns):
    """Somebody levels the wear of a block with the sequence's first page of K."""
    page = ftl.sequences[handle].maps["k"].slots[layer, 0, :1]
    if in_flash(page).all():
        ftl.placement.close(ftl.sequences[handle].writer)
        ftl.collector._wear_level_block(int(ftl.nand.block_of(page)[0]), now_ns)


def between_steps(twins, seqs, kind, layer):
    """What changes sequences that are being decoded."""
    if kind == 0:
        twins.crop(seqs, layer)
    elif kind == 1:
        twins.do(KvRead(seqs[:1], layer))
    elif kind == 2:
        for firmware in twins.both:
            move(firmware.ftl, seqs[0], layer, twins.now_ns)
        twins.do(Flush())
    elif kind == 3:
        twins.append(twins.some(), layer, 60)


def live(twins, bits, methods, rounds):
    """Run all kinds of commands in random order."""
    for _ in range(rounds):
        if not twins.lengths:
            twins.create(3, bits)
        kind, layer = twins.generator.integers(0, 12), int(twins.generator.integers(0, LAYERS))
        if kind < 7:
            seqs = twins.some() if kind else tuple(twins.lengths)[:1]
            decode(twins, seqs, methods, int(twins.generator.integers(1, 40)))
            between_steps(twins, seqs, kind, layer)
            decode(twins, seqs, methods, 2)
        elif kind == 7:
            twins.append(twins.some(), layer, 60)
        elif kind == 8:
            twins.do(KvRead(twins.some(), layer))
            twins.attend(twins.some(), layer, str(methods[0]), good=False)
        elif kind == 9:
            twins.do(Flush())
        elif kind == 10 or len(twins.lengths) > 4:
            twins.free(next(iter(twins.lengths)))
        else:
            twins.create(int(twins.generator.integers(1, 3)), bits)
    twins.equal()


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
@pytest.mark.parametrize(
    ("bits", "methods"),
    [
        (16, FP16_METHODS),
        (4, ("dense", "sparf")),
        (LAYOUTS["progressive-exact"].code, ("progressive", "dense")),
        (LAYOUTS["progressive"].code, ("progressive", "dense")),
        (LAYOUTS["progressive-bf16-exact"].code, ("progressive", "kivi")),
    ],
)
@pytest.mark.parametrize("dram_bytes", [1 << 20, 64 * 512])
def test_cached_plans_change_no_result(small_drive, schedule, bits, methods, dram_bytes):
    engine = replace(small_drive.engine, schedule=schedule)
    for seed in range(2):
        live(Twins(replace(small_drive, engine=engine, dram_bytes=dram_bytes), seed), bits, methods, 20)


def test_cached_plans_change_no_result_with_data_loss(small_drive):
    for seed in range(4):
        twins = Twins(small_drive, seed, FaultPlan(seed=seed, raw_bit_errors=5.8e-3))
        live(twins, 16, ("dense", "sparf"), 15)
    assert twins.both[0].ftl.counters.unrecovered


def one_decoding(drive, faults=None):
    """Twins with one sequence of two full groups, and a step kept."""
    twins = Twins(drive, 0, faults)
    twins.create(1, 16)
    (handle,) = twins.lengths
    per_group = twins.both[0].ftl.sequences[handle].maps["k"].per_group
    k = twins.half(2 * per_group + 1, H, D)
    twins.do(KvAppend((handle,), 0, np.array([k.shape[0]]), k, k))
    twins.lengths[handle][0] = k.shape[0]
    return twins, (handle,)


def test_step_reads_pages_moved_by_collection(small_drive):
    twins, seqs = one_decoding(small_drive)
    assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS
    for firmware in twins.both:
        move(firmware.ftl, seqs[0], 0, twins.now_ns)
        assert firmware.ftl.counters.levelled
    twins.do(Flush())
    assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS
    twins.equal()


def test_a_sequence_that_loses_data_between_steps_is_refused(small_drive):
    twins, seqs = one_decoding(small_drive)
    assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS
    for firmware in twins.both:
        ftl = firmware.ftl
        ftl.kv.lose(ftl.nand.tags[ftl.sequences[seqs[0]].maps["k"].slots[0, 0, :1]], True)
    assert twins.attend(seqs, 0, "dense").status is Status.UNRECOVERED_READ_ERROR


def test_a_sequence_that_was_freed_between_steps_is_unknown(small_drive):
    twins, seqs = one_decoding(small_drive)
    assert twins.attend(seqs, 0, "dense").status is Status.SUCCESS
    twins.do(KvFree(seqs))
    assert twins.attend(seqs, 0, "dense").status is Status.UNKNOWN_SEQUENCE


def test_number_of_cached_plans_is_bounded(small_drive):
    twins, _ = one_decoding(small_drive)
    twins.create(6, 16)
    kv, batches = twins.both[0].ftl.kv, list(permutations(twins.lengths))
    assert len(batches) > MAX_PLANS
    for handles in batches:
        kv.plan(handles, 0)
    assert 0 < len(kv.plans) <= MAX_PLANS
