"""Prompts with known keys and values, for tests of prefix storage."""

import numpy as np

from csd_spec import ModelShape
from host_driver.prefixes.cache_keys import PrefixNames
from host_driver.prefixes.identity import ModelIdentity

SHAPE = ModelShape(name="tiny", layers=2, q_heads=4, kv_heads=4, head_dim=16)
BLOCK = 8
NAMES = PrefixNames(shape=SHAPE, drives=2, model=ModelIdentity.from_text("m"), block_tokens=BLOCK)


def rows(tokens):
    """Keys and values as a function of all tokens before, as a model's are; any 16 bits."""
    bits = np.zeros((2, SHAPE.layers, len(tokens), 4, 16), np.uint16)
    state = 17
    for at, token in enumerate(tokens):
        state = (state * 31 + token + 7) % 65_521
        bits[:, :, at] = state
    bits += np.arange(16, dtype=np.uint16) + 1000 * np.arange(2, dtype=np.uint16)[:, None, None, None, None]
    bits += (
        77 * np.arange(4, dtype=np.uint16)[:, None]
        + 999 * np.arange(SHAPE.layers, dtype=np.uint16)[:, None, None, None]
    )
    return bits.view(np.float16)


def holds(store, tokens, count):
    """Whether the first `count` tokens are found, with the right keys and values."""
    return right(store.load(NAMES.keys(tokens)), tokens, count)


def right(loaded, tokens, count):
    """Whether the found keys and values are those of the first `count` tokens."""
    if loaded is None or not count:
        return loaded is None and not count
    return loaded[0].shape[1] == count and all(
        np.array_equal(part.view(np.uint16), whole[:, :count].view(np.uint16))
        for part, whole in zip(loaded, rows(tokens), strict=True)
    )
