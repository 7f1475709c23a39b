"""Prefixes in drives: what is found is what was stored, through eviction, forks, restarts and deaths.

partner of: host_driver/objects.py
"""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest

from csd_firmware import InProcessDevice
from csd_spec import Completion, DeviceError, DriveSpec, KvAppend, KvGather, KvName, ModelShape, Status
from host_driver.objects import PrefixStore

SHAPE = ModelShape(name="tiny", layers=2, q_heads=4, kv_heads=4, head_dim=16)
BLOCK = 8


@pytest.fixture
def devices(small_drive: DriveSpec):  # type: ignore[no-untyped-def]
    made = [InProcessDevice(small_drive) for _ in range(2)]
    yield made
    for device in made:
        device.close()


def rows(tokens: list[int]):  # type: ignore[no-untyped-def]
    """K and V as a function of all tokens before, as a model's are; any 16 bits."""
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


def holds(store: PrefixStore, tokens: list[int], count: int) -> bool:
    """Whether so many tokens are found, with their K and V."""
    found, wanted = store.load(tokens), rows(tokens)
    if found is None or not count:
        return found is None and not count
    return found[0].shape[1] == count and all(
        np.array_equal(part.view(np.uint16), whole[:, :count].view(np.uint16))
        for part, whole in zip(found, wanted, strict=True)
    )


def prompt(draw: random.Random, prompts: list[list[int]], most: int = 60) -> list[int]:
    """One that often begins as another."""
    begin = draw.choice(prompts)[: draw.randint(0, most)] if prompts and draw.random() < 0.7 else []
    return begin + [draw.randrange(100) for _ in range(draw.randint(1, most - 20))]


def test_what_is_found_is_what_was_stored(devices) -> None:
    store = PrefixStore(devices, SHAPE, b"m", BLOCK)
    tokens = list(range(30))
    assert store.store(tokens, *rows(tokens)) == 3 and store.store(tokens, *rows(tokens)) == 0
    assert holds(store, tokens, 24) and holds(store, tokens[:17], 16) and holds(store, tokens[:7], 0)
    k, _ = store.load(tokens, first=8) or pytest.fail("not found")
    assert np.array_equal(k.view(np.uint16), rows(tokens)[0][:, 8:24].view(np.uint16))
    parted = [*tokens[:16], 99, *tokens[17:28]]
    assert store.match(parted).tokens == 16
    store.store(parted, *rows(parted))
    assert holds(store, parted, 24) and holds(store, tokens, 24)
    assert not holds(PrefixStore(devices, SHAPE, b"other", BLOCK), tokens, 24)


@pytest.mark.parametrize("seed", range(4))
def test_eviction_keeps_its_limit_and_nothing_wrong_is_found(devices, seed: int) -> None:
    draw, prompts = random.Random(seed), list[list[int]]()
    store = PrefixStore(devices, SHAPE, b"m", BLOCK, max_blocks=12)
    for turn in range(60):
        tokens = prompt(draw, prompts)
        store.store(tokens, *rows(tokens))
        prompts.append(tokens)
        assert holds(store, tokens, len(tokens) // BLOCK * BLOCK) and store.blocks <= 12
        for each in draw.sample(prompts, min(4, len(prompts))):
            assert holds(store, each, store.match(each).tokens)
        if turn % 20 == 19:  # a host that knows nothing
            store.flush()
            before, store = store.blocks, PrefixStore(devices, SHAPE, b"m", BLOCK, max_blocks=12)
            assert store.blocks == before
    assert store.evicted or turn == 59
    assert sum(len(seq.names) for seq in devices[0].firmware.ftl.sequences.values()) == store.blocks


def test_pinned_blocks_stay(devices) -> None:
    store = PrefixStore(devices, SHAPE, b"m", BLOCK, max_blocks=3)
    kept, others = list(range(16)), [list(range(50 * n, 50 * n + 8)) for n in range(1, 5)]
    store.store(kept, *rows(kept))
    store.pin(kept)
    for each in others:
        store.store(each, *rows(each))
    assert holds(store, kept, 16) and holds(store, others[-1], 8) and holds(store, others[0], 0)
    with pytest.raises(ValueError, match="2 blocks have no room: all 3 that are kept are in use"):
        store.store(list(range(900, 916)), *rows(list(range(900, 916))))
    store.unpin(kept)
    store.store(list(range(900, 916)), *rows(list(range(900, 916))))
    assert holds(store, list(range(900, 916)), 16)


class Dies(Exception):
    """The host's process."""


class Faulty:
    """A drive that refuses a kind of command, or during which the host dies."""

    def __init__(self, device: InProcessDevice) -> None:
        self.device, self.name, self.spec = device, device.name, device.spec
        self.refuses: type | None = None
        self.dies: type | None = None
        self.left = 0

    def submit(self, command, submit_ns: int):  # type: ignore[no-untyped-def]
        if type(command) in (self.refuses, self.dies):
            self.left -= 1
            if self.left < 0:
                if self.dies:
                    raise Dies
                done = Future[Completion]()
                done.set_result(Completion(status=Status.CAPACITY_EXCEEDED, reason="full"))
                return done
        return self.device.submit(command, submit_ns)


@pytest.mark.parametrize("kind", [KvAppend, KvName])
@pytest.mark.parametrize("left", [0, 1])
def test_a_host_that_dies_leaves_no_half_block(devices, kind: type, left: int) -> None:
    faulty = [devices[0], Faulty(devices[1])]
    store = PrefixStore(faulty, SHAPE, b"m", BLOCK)  # type: ignore[arg-type]
    first, longer = list(range(20)), list(range(40))
    store.store(first, *rows(first))
    faulty[1].dies, faulty[1].left = kind, left if kind is KvAppend else 0
    with pytest.raises(Dies):
        store.store(longer, *rows(longer))
    again = PrefixStore(devices, SHAPE, b"m", BLOCK)
    assert holds(again, longer, 16) and again.blocks == 2
    again.store(longer, *rows(longer))
    assert holds(again, longer, 40)
    assert all(len(device.firmware.ftl.sequences) == 1 for device in devices)


def test_a_drive_that_is_full_or_loses_data_does_no_harm(devices) -> None:
    faulty = Faulty(devices[1])
    store = PrefixStore([devices[0], faulty], SHAPE, b"m", BLOCK)  # type: ignore[list-item]
    first, longer = list(range(16)), list(range(40))
    store.store(first, *rows(first))
    faulty.refuses, faulty.left = KvAppend, 1
    with pytest.raises(DeviceError, match="full"):
        store.store(longer, *rows(longer))
    faulty.refuses = None
    assert holds(store, longer, 16)
    store.store(longer, *rows(longer))
    assert holds(store, longer, 40)
    faulty.refuses, faulty.left = KvGather, 0
    assert store.load(longer) is None and store.blocks == 0
    faulty.refuses = None
    assert store.store(longer, *rows(longer)) == 5 and holds(store, longer, 40)


def test_bad_values(devices) -> None:
    with pytest.raises(ValueError, match="block_tokens = 0"):
        PrefixStore(devices, SHAPE, b"m", 0)
    with pytest.raises(ValueError, match="5 blocks: the store keeps 2"):
        PrefixStore(devices, SHAPE, b"m", BLOCK, 2).store(list(range(40)), *rows(list(range(40))))
