"""Rows of a layer that the host keeps because a drive could lose them."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_firmware import InProcessDrive
from csd_link.recovery import RecoveringDrive, UnflushedLayer
from csd_spec import (
    LAYOUTS,
    Completion,
    Flush,
    KvAppend,
    KvCrop,
    KvExist,
    KvFree,
    KvName,
    KvRead,
    SeqCreate,
    Status,
)
from csd_spec.arrays import keys_of
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

steps = st.lists(st.tuples(st.sampled_from(["append", "crop", "flush"]), st.integers(0, 12)), max_size=20)


@given(steps)
def test_layer_keeps_rows_not_yet_flushed(steps):
    """Against a list of numbered tokens; the drive may have lost all tokens after `least`."""
    layer, tokens, least, number = UnflushedLayer(), [], 0, 0
    for verb, count in steps:
        if verb == "append":
            rows = np.arange(number, number + count, dtype=np.float16).reshape(-1, 1, 1)
            layer.rows.append((rows, -rows))
            tokens += range(number, number + count)
            number += count
        elif verb == "crop":
            layer.crop(count)
            tokens, least = tokens[:count], min(least, count)
        else:
            layer, least = UnflushedLayer(layer.length), len(tokens)
    assert (layer.length, layer.kept) == (len(tokens), least)
    numbers = [int(value) for k, _ in layer.rows for value in k.ravel()]
    assert numbers == tokens[least:]
    assert all(np.array_equal(k, -v) for k, v in layer.rows)


def test_a_crop_between_two_appends_keeps_no_empty_rows():
    layer = UnflushedLayer()
    for tokens in (3, 2):
        layer.rows.append((np.zeros((tokens, 1, 1), np.float16),) * 2)
    layer.crop(3)
    assert [len(k) for k, _ in layer.rows] == [3]


class Reborn:
    """Attaches to a drive that loses unflushed data when it dies; it dies in command number `dies_in`."""

    def __init__(self, spec, folder, dies_in):
        self.spec, self.folder, self.dies_in, self.seen = spec, folder, dies_in, []

    def __call__(self):
        drive, reborn = InProcessDrive(self.spec, self.folder), self

        class Attached:
            name, spec, max_bytes, lost = "reborn", self.spec, drive.max_bytes, None
            identity = SimpleNamespace(restarts=True)

            def submit(self, command, submit_ns):
                reborn.seen.append(command)
                if len(reborn.seen) == reborn.dies_in:
                    future = Future()
                    future.set_result(Completion(status=Status.PATH_LOST, reason="it died"))
                    return future
                return drive.submit(command, submit_ns)

            def close(self):
                drive.close()

        return Attached()


@pytest.mark.parametrize("dies_in", range(1, 6))
def test_crop_keeps_rounded_rows_after_any_kill(tmp_path, dies_in):
    """In a layout that rounds full groups: rows that were given again would not be."""
    rows = np.random.default_rng(0).standard_normal((400, 1, 64)).astype(np.float16)
    create = SeqCreate(1, 1, 1, 64, 512, LAYOUTS["progressive"].code)

    def commands(seqs):
        yield KvAppend(seqs, 0, np.array([400]), rows, rows)
        yield KvCrop(seqs, 0, np.array([150]))
        yield KvRead(seqs, 0)

    def run(device):
        seqs = tuple(device.submit(create, 0).result().data[0].tolist())
        done = [device.submit(command, 0).result() for command in commands(seqs)]
        assert [completion.status for completion in done] == [Status.SUCCESS] * len(done), done
        device.close()
        return done[-1].data

    wanted = run(InProcessDrive(INSTCSD_ZYNQ7045_8CH))
    assert not np.array_equal(wanted[0], rows[:150])
    connect = Reborn(INSTCSD_ZYNQ7045_8CH, tmp_path, dies_in)
    for own, theirs in zip(run(RecoveringDrive(connect)), wanted, strict=True):
        assert np.array_equal(own, theirs)
    assert len(connect.seen) > dies_in


def test_key_of_a_sequence_freed_while_the_drive_died_names_nothing(tmp_path):
    """At its last flush the drive had the key at another sequence, which must not get it back."""
    create = SeqCreate(2, 1, 1, 64, 64, 16)
    rows = np.ones((2, 1, 64), np.float16)
    key, bind = keys_of([bytes(15) + b"k"]), lambda seq: KvName((seq,), np.array([1]), key)
    connect = Reborn(INSTCSD_ZYNQ7045_8CH, tmp_path, dies_in=-1)
    device = RecoveringDrive(connect)
    old, new = device.submit(create, 0).result().data[0].tolist()
    for command in (KvAppend((old, new), 0, np.array([1, 1]), rows, rows), bind(old), Flush(), bind(new)):
        assert device.submit(command, 0).result().status is Status.SUCCESS
    assert device.submit(KvExist(key), 0).result().data[0].tolist() == [new]
    connect.dies_in = len(connect.seen) + 1
    assert device.submit(KvFree((new,)), 0).result().status is Status.SUCCESS
    assert len(connect.seen) > connect.dies_in
    assert device.submit(KvExist(key), 0).result().data[0].tolist() == [0]
    assert device.submit(KvRead((old,), 0), 0).result().status is Status.SUCCESS
    device.close()
