"""Records survive being written to pages and read back."""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl, FtlError
from ftl.record import Record, RecordType, describe, form_of, tail_bytes, tail_rows

LAYOUT = LAYOUTS["fp16"].paged(512, 16, 4)


def test_record_pages_round_trip_head_and_rows():
    head, rows = {"number": 3, "sequences": [{"handle": 7}]}, [b"abc", b"", bytes(range(256)) * 5]
    record = Record.of(RecordType.CHANGES, 5, 17, head, b"".join(rows))
    pages = record.pack(512)
    assert pages.shape[1] == 512 and pages.shape[0] * 512 >= 3 + 1280
    assert Record.unpack(pages) == record and record.head() == head
    without = replace(record, rows=None)
    assert Record.unpack(without.pack(512)) == without and without.digest == record.digest


def test_record_follows_exactly_one_record():
    first = Record.of(RecordType.CHECKPOINT, 5, 0, {"gone": []}, b"")
    assert Record.of(RecordType.CHANGES, 6, first.digest, {}, b"").follows(first)
    assert not Record.of(RecordType.CHANGES, 6, first.digest + 1, {}, b"").follows(first)
    assert not Record.of(RecordType.CHANGES, 7, first.digest, {}, b"").follows(first)


@pytest.mark.parametrize(("at", "value"), [(0, 3), (4, 1), (4, 3), (6, 9)])
def test_a_record_of_another_kind_version_or_type_is_refused(at, value):
    pages = Record.of(RecordType.CHANGES, 5, 17, {}, b"").pack(512)
    pages[0, at] = value
    with pytest.raises(FtlError, match="use the vcsd that wrote it"):
        Record.unpack(pages)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_recorded_as_in_drives_of_earlier_releases(small_drive, name):
    ftl, form = Ftl(small_drive), LAYOUTS[name].form(4096, 64, 1024)
    (handle,) = ftl.create(1, 1, 1, form)
    described = describe(ftl.kv, ftl.sequence(handle))
    of_copy = {"fp16": [16], "int8": [8], "int4": [4], "int8-bf16": [8, 3], "int4-bf16": [4, 3]}
    planes = [form.bits, form.layout.code] if form.progressive else [16, form.layout.code]
    assert described["shape"] == [1, 1, 64, form.m, *of_copy.get(name, planes)]
    assert form_of(described, 4096) == form


def test_the_layout_of_a_sequence_may_not_be_loaded():
    described = {"handle": 7, "shape": [1, 1, 64, 4, 16, 240], "row_bytes": 96}
    assert form_of(described, 4096) is None
    assert tail_bytes(described, None) == 96


def test_description_of_sequence_has_buffered_rows(small_drive):
    ftl = Ftl(small_drive)
    (handle,) = ftl.create(1, 2, 2, LAYOUT)
    k, v = (np.random.default_rng(seed).standard_normal((37, 2, 16)).astype(np.float16) for seed in (0, 1))
    ftl.append([handle], 1, np.array([37]), k, v, 0)
    seq = ftl.sequence(handle)
    described = describe(ftl.kv, seq)
    waiting = 37 % LAYOUT.n
    assert described["lengths"] == [0, 37] and described["shape"] == [2, 2, 16, 4, 16]
    assert form_of(described, 512) == LAYOUT
    assert tail_rows(ftl.kv, seq, 0) == b""
    assert tail_rows(ftl.kv, seq, 1) == k[-waiting:].tobytes() + v[-waiting:].tobytes()
    assert tail_bytes(described, LAYOUT) == len(tail_rows(ftl.kv, seq, 1))
