"""What is kept of a layer that a drive could lose."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from csd_link.recovery import Layer

steps = st.lists(st.tuples(st.sampled_from(["append", "crop", "flush"]), st.integers(0, 12)), max_size=20)


@given(steps)
def test_a_layer_keeps_what_is_not_sure_to_be_in_flash(steps):
    """Against a list of numbered tokens, of which the drive may have lost all after `least`."""
    layer, tokens, least, number = Layer(), [], 0, 0
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
            layer, least = Layer(layer.length), len(tokens)
    assert (layer.length, layer.kept) == (len(tokens), least)
    kept = [int(value) for k, _ in layer.rows for value in k.ravel()]
    assert kept == tokens[least:]
    assert all(np.array_equal(k, -v) for k, v in layer.rows)


def test_a_crop_between_two_appends_keeps_no_empty_rows():
    layer = Layer()
    for tokens in (3, 2):
        layer.rows.append((np.zeros((tokens, 1, 1), np.float16),) * 2)
    layer.crop(3)
    assert [len(k) for k, _ in layer.rows] == [3]
