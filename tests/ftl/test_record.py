"""A record's pages give back what was put into them."""

import numpy as np

from csd_spec import KvLayout
from ftl import Ftl
from ftl.record import describe, form_of, pack, tail_bytes, tail_rows, unpack

LAYOUT = KvLayout(page_bytes=512, head_dim=16, m=4)


def test_pages_give_back_head_and_rows():
    head, rows = {"number": 3, "sequences": [{"handle": 7}]}, [b"abc", b"", bytes(range(256)) * 5]
    pages = pack(head, rows, 512)
    assert pages.shape[1] == 512 and pages.shape[0] * 512 >= 3 + 1280
    assert unpack(pages) == (head, b"".join(rows))


def test_a_sequence_is_described_with_the_rows_that_wait(small_drive):
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
