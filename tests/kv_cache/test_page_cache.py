"""The simulated page cache against a list of its pieces, the least recently used one first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.page_cache import PageCache
from tests.properties import examples

PIECES = [(file, number) for file in "ab" for number in range(3)]
STEPS = st.tuples(st.sampled_from(["read", "put", "limit", "forget"]), st.sampled_from(PIECES), st.integers(0, 60))


@settings(max_examples=examples(100))
@given(st.lists(STEPS, max_size=40), st.sampled_from([None, 0, 100]))
def test_cache_holds_the_pieces_used_last(steps, limit):
    cache, pieces = PageCache(limit), list[tuple[tuple[str, int], int]]()
    read = hit = 0
    for step, piece, size in steps:
        known = dict(pieces).get(piece, 0)
        if step in ("read", "put"):
            if step == "read":
                assert cache.read(piece, size, 2 * size) == (known >= size)
                read, hit = read + 2 * size, hit + 2 * size * (known >= size)
            else:
                cache.put(piece, size)
            pieces = [entry for entry in pieces if entry[0] != piece] + [(piece, max(known, size))]
        elif step == "limit":
            limit = size * 4 if size else None
            cache.set_limit(limit)
        else:
            cache.forget(piece[0])
            pieces = [entry for entry in pieces if entry[0][0] != piece[0]]
        while limit is not None and sum(held for _, held in pieces) > limit:
            pieces.pop(0)
        assert list(cache._pieces.items()) == pieces
        assert cache.blocks_at == sum(held for _, held in pieces)
        assert (cache.read_bytes, cache.hit_bytes) == (read, hit)
    assert cache.hit_share == (hit / read if read else None)
