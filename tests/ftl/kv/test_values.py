"""Values by key: their bytes, their keys, and their state if power is lost during an overwrite."""

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl, Nand, OutOfSpaceError
from ftl.kv.values import VALUES, is_value

LABEL = 5 | VALUES
SIZES = (0, 1, 511, 512, 513, 1024, 1025, 5000)
LAYOUT = LAYOUTS["fp16"].paged(512, 8, 4)


@pytest.fixture
def ftl(small_drive):
    return Ftl(small_drive, Nand(small_drive.geometry))


def restarted(ftl):
    return Ftl(ftl.spec, ftl.nand)


def value_of(ftl, key, label=LABEL):
    """The value under a key; None if it does not exist."""
    seq = ftl.kv.names.holder(label, key)
    return None if seq is None else ftl.read_value(seq.handle, seq.names[key], 0)[0]


def data_of(size, seed=0):
    return np.random.default_rng(size + seed).bytes(size)


def test_values_of_any_size_read_back(ftl):
    for size in SIZES:
        handle, finish_ns = ftl.store_value(LABEL, b"%d" % size, data_of(size), 1000)
        assert finish_ns > 1000 or not size
        for part in (0, 1, 700, size):
            assert ftl.read_value(handle, min(part, size), 0)[0] == data_of(size)[:part]
    assert ftl.buffers.left == ftl.buffers.capacity, "no value has rows that wait in drive DRAM"
    ftl.flush(0)
    again = restarted(ftl)
    assert [value_of(again, b"%d" % size) for size in SIZES] == [data_of(size) for size in SIZES]


def test_value_key_includes_length_and_is_no_prefix_key(ftl):
    (sequence,) = ftl.create(1, 1, 1, LAYOUT)
    ftl.label([sequence], 5)
    rows = np.ones((3, 1, 8), np.float16)
    ftl.append([sequence], 0, np.array([3]), rows, rows, 0)
    ftl.name(sequence, [b"a" * 16], [3])
    for key in (b"a", b"a\0", b"a" * 16):
        ftl.store_value(LABEL, key, key * 3, 0)
    assert [value_of(ftl, key) for key in (b"a", b"a\0", b"a" * 16)] == [b"a" * 3, b"a\0" * 3, b"a" * 48]
    assert ftl.kv.names.find(5, [b"a" * 16]) == [(sequence, 3)]
    assert value_of(ftl, b"a", 6 | VALUES) is None, "another's"
    assert (is_value(LABEL), is_value(5)) == (True, False)


@pytest.mark.parametrize("everything", [True, False])
def test_power_loss_keeps_old_or_new_value(ftl, everything):
    """Also a record whose only content is released pages."""
    old, _ = ftl.store_value(LABEL, b"key", b"old" * 500, 0)
    ftl.flush(0)
    new, _ = ftl.store_value(LABEL, b"key", b"new" * 700, 0)
    assert value_of(restarted(ftl), b"key") == b"old" * 500
    ftl.kv.forget(ftl.kv.sequences[old])
    assert value_of(restarted(ftl), b"key") == b"old" * 500
    assert ftl.journal.record(0, everything)
    again = restarted(ftl)
    assert value_of(again, b"key") == b"new" * 700
    assert list(again.sequences) == [new]
    ftl.free([new], 0)
    ftl.flush(0)
    assert not restarted(ftl).sequences


def test_value_of_incomplete_store_is_dropped(ftl, monkeypatch):
    """A checkpoint may be written while its pages are programmed."""
    ftl.store_value(LABEL, b"key", b"old" * 500, 0)
    monkeypatch.setattr(Ftl, "name", lambda self, *named: self.journal.record(0, True) and None)
    ftl.store_value(LABEL, b"key", b"new" * 700, 0)
    again = restarted(ftl)
    assert value_of(again, b"key") == b"old" * 500
    assert len(again.sequences) == 1
    assert not again.findings
    monkeypatch.undo()
    again.flush(0)
    assert value_of(restarted(again), b"key") == b"old" * 500


def test_oversized_store_keeps_old_value(ftl, small_drive):
    ftl.store_value(LABEL, b"key", b"old" * 500, 0)
    with pytest.raises(OutOfSpaceError):
        ftl.store_value(LABEL, b"key", bytes(small_drive.geometry.capacity_bytes), 0)
    assert value_of(ftl, b"key") == b"old" * 500
    assert len(ftl.sequences) == 1
    assert ftl.kv.usage.of(LABEL).pages == 4


def test_moved_dropped_name_has_one_owner(ftl):
    """The sequence that lost it is recorded with the one that got it."""
    first, second = ftl.create(2, 1, 1, LAYOUT)
    rows = np.ones((70, 1, 8), np.float16)
    for handle in (first, second):
        ftl.append([handle], 0, np.array([70]), rows, rows, 0)
    ftl.name(first, [b"k" * 16], [3])
    ftl.flush(0)
    ftl.unname(0, [b"k" * 16])
    ftl.name(second, [b"k" * 16], [2])
    ftl.crop(second, 0, 40, 0)
    ftl.journal.record(0, False)
    again = restarted(ftl)
    assert [seq.names for seq in again.sequences.values()] == [{}, {b"k" * 16: 2}]
