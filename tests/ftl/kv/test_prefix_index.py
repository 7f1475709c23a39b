"""Keys in order, however many."""

import random

from ftl.kv.prefix_index import RUN, SortedKeys


def test_keys_stay_in_order_over_many_runs():
    draw, keys = random.Random(2), SortedKeys()
    alive = {draw.randbytes(2) for _ in range(6 * RUN)}
    for key in alive:
        keys.add(key)
    assert list(keys.iterate_after(b"")) == sorted(alive)
    gone = set(draw.sample(sorted(alive), len(alive) - 50)) | {key for key in alive if b"\x40" < key < b"\xc0"}
    for key in gone:
        keys.remove(key)
    left = sorted(alive - gone)
    assert list(keys.iterate_after(b"")) == left
    for key in (*left, *gone, b"\xff\xff\xff"):
        assert list(keys.iterate_after(key)) == [other for other in left if other > key]
    for key in left:
        keys.remove(key)
    assert not list(keys.iterate_after(b""))
    keys.add(b"again")
    assert list(keys.iterate_after(b"")) == [b"again"]
