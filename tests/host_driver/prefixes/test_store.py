"""Prefixes in drives: found prefixes equal the stored ones, through eviction, forks, restarts and deaths.

partner of: host_driver/prefixes/store.py, host_driver/prefixes/cache_keys.py
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_spec import Completion, DriveError, DriveSpec, KvAppend, KvGather, KvName, Status
from host_driver.prefixes.cache_keys import AdmissionFilter
from host_driver.prefixes.identity import ModelIdentity
from host_driver.prefixes.manifest import list_keys
from host_driver.prefixes.store import PrefixStore
from tests.host_driver.prefixes.prompts import BLOCK, NAMES, SHAPE, holds, rows

OTHER = ModelIdentity.from_text("other")


@pytest.fixture
def devices(small_drive: DriveSpec):  # type: ignore[no-untyped-def]
    made = [InProcessDrive(small_drive) for _ in range(2)]
    yield made
    for device in made:
        device.close()


def prompt(draw: random.Random, prompts: list[list[int]], most: int = 60) -> list[int]:
    """One that often begins as another."""
    begin = draw.choice(prompts)[: draw.randint(0, most)] if prompts and draw.random() < 0.7 else []
    return begin + [draw.randrange(100) for _ in range(draw.randint(1, most - 20))]


def test_found_rows_equal_stored_rows(devices) -> None:
    store = PrefixStore(devices, NAMES)
    tokens = list(range(30))
    assert store.store(NAMES.keys(tokens), *rows(tokens)) == 3 and store.store(NAMES.keys(tokens), *rows(tokens)) == 0
    assert holds(store, tokens, 24) and holds(store, tokens[:17], 16) and holds(store, tokens[:7], 0)
    k, _ = store.load(NAMES.keys(tokens), first=8) or pytest.fail("not found")
    assert np.array_equal(k.view(np.uint16), rows(tokens)[0][:, 8:24].view(np.uint16))
    parted = [*tokens[:16], 99, *tokens[17:28]]
    assert store.match(NAMES.keys(parted)).tokens == 16
    store.store(NAMES.keys(parted), *rows(parted))
    assert holds(store, parted, 24) and holds(store, tokens, 24)
    assert not holds(PrefixStore(devices, replace(NAMES, model=OTHER)), tokens, 24)


@pytest.mark.parametrize("seed", range(4))
def test_eviction_keeps_limit_and_finds_right_rows(devices, seed: int) -> None:
    draw, prompts = random.Random(seed), list[list[int]]()
    store = PrefixStore(devices, NAMES, max_blocks=12)
    for turn in range(60):
        tokens = prompt(draw, prompts)
        store.store(NAMES.keys(tokens), *rows(tokens))
        prompts.append(tokens)
        assert holds(store, tokens, len(tokens) // BLOCK * BLOCK) and store.blocks <= 12
        for each in draw.sample(prompts, min(4, len(prompts))):
            assert holds(store, each, store.match(NAMES.keys(each)).tokens)
        if turn % 20 == 19:  # a host that knows nothing
            store.flush()
            before, store = store.blocks, PrefixStore(devices, NAMES, max_blocks=12)
            assert store.blocks == before
    assert store.evicted or turn == 59
    assert sum(len(seq.names) for seq in devices[0].firmware.ftl.sequences.values()) == 2 * store.blocks + 1


def test_pinned_blocks_stay(devices) -> None:
    store = PrefixStore(devices, NAMES, max_blocks=3)
    pinned, others = list(range(16)), [list(range(50 * n, 50 * n + 8)) for n in range(1, 5)]
    store.store(NAMES.keys(pinned), *rows(pinned))
    store.pin(NAMES.keys(pinned))
    for other in others:
        store.store(NAMES.keys(other), *rows(other))
    assert holds(store, pinned, 16) and holds(store, others[-1], 8) and holds(store, others[0], 0)
    with pytest.raises(ValueError, match="no space for 2 blocks: all 3 of the store are in use"):
        store.store(NAMES.keys(list(range(900, 916))), *rows(list(range(900, 916))))
    store.unpin(NAMES.keys(pinned))
    store.store(NAMES.keys(list(range(900, 916))), *rows(list(range(900, 916))))
    assert holds(store, list(range(900, 916)), 16)


def test_block_pinned_twice_stays_until_it_is_unpinned_twice(devices) -> None:
    store = PrefixStore(devices, NAMES, max_blocks=2)
    one, other = NAMES.keys(list(range(8))), NAMES.keys(list(range(50, 58)))
    for tokens in (range(8), range(50, 58)):
        store.store(NAMES.keys(list(tokens)), *rows(list(tokens)))
    store.pin(one)
    store.pin(one)
    store.pin(other)
    store.unpin(one)
    assert not store.remove(one) and not store.remove(other)
    store.unpin(one)
    assert store.remove(one) and not store.remove(other), "an unpin is of its own blocks"


def test_shared_block_is_evicted_after_its_fork(devices) -> None:
    store = PrefixStore(devices, NAMES, max_blocks=3)
    prompt, fork = list(range(16)), [*range(8), *range(80, 88)]
    for tokens in (prompt, fork, list(range(50, 66))):
        store.store(NAMES.keys(tokens), *rows(tokens))
    assert holds(store, fork, 8), "the oldest are the last block of the prompt, then that of the fork"


class Dies(Exception):
    """The host's process."""


class Faulty:
    """A drive that refuses a kind of command, or during which the host dies."""

    def __init__(self, device: InProcessDrive) -> None:
        self.device, self.name, self.spec = device, device.name, device.spec
        self.refuses: type | None = None
        self.dies: type | None = None
        self.left = 0
        self.times = 1 << 30  # that it refuses

    def submit(self, command, submit_ns: int):  # type: ignore[no-untyped-def]
        if type(command) in (self.refuses, self.dies):
            self.left -= 1
            if self.left < 0 and self.left >= -self.times:
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
    store = PrefixStore(faulty, NAMES)  # type: ignore[arg-type]
    first, longer = list(range(20)), list(range(40))
    store.store(NAMES.keys(first), *rows(first))
    faulty[1].dies, faulty[1].left = kind, left if kind is KvAppend else 0
    with pytest.raises(Dies):
        store.store(NAMES.keys(longer), *rows(longer))
    again = PrefixStore(devices, NAMES)
    assert holds(again, longer, 16) and again.blocks == 2
    again.store(NAMES.keys(longer), *rows(longer))
    assert holds(again, longer, 40)
    assert all(len(device.firmware.ftl.sequences) == 2 for device in devices)


def test_rows_after_last_key_of_dead_host_are_cropped(devices) -> None:
    faulty = [devices[0], Faulty(devices[1])]
    store = PrefixStore(faulty, NAMES)  # type: ignore[arg-type]
    store.store(NAMES.keys(list(range(16))), *rows(list(range(16))))
    faulty[1].dies, faulty[1].left = KvAppend, 1
    with pytest.raises(Dies):
        store.store(NAMES.keys(list(range(40))), *rows(list(range(40))))
    again, other = PrefixStore(devices, NAMES), [*range(16), *range(70, 94)]
    again.store(NAMES.keys(other), *rows(other))
    assert holds(again, other, 40) and not again.rejected


def test_full_or_lossy_drive_returns_nothing_wrong(devices) -> None:
    faulty = Faulty(devices[1])
    store = PrefixStore([devices[0], faulty], NAMES)  # type: ignore[list-item]
    first, longer = list(range(16)), list(range(40))
    store.store(NAMES.keys(first), *rows(first))
    faulty.refuses, faulty.left = KvAppend, 1
    with pytest.raises(DriveError, match="full"):
        store.store(NAMES.keys(longer), *rows(longer))
    faulty.refuses = None
    assert holds(store, longer, 16)
    store.store(NAMES.keys(longer), *rows(longer))
    assert holds(store, longer, 40)
    faulty.refuses, faulty.left = KvGather, 0
    assert store.load(NAMES.keys(longer)) is None and store.blocks == 0
    faulty.refuses = None
    assert store.store(NAMES.keys(longer), *rows(longer)) == 5 and holds(store, longer, 40)


def test_foreign_names_kept_but_evicted_first(devices) -> None:
    shallow = replace(NAMES, shape=replace(SHAPE, layers=1), model=OTHER)
    tokens, others = list(range(40)), list(range(100, 140))
    PrefixStore(devices, shallow).store(shallow.keys(others), *(part[:1] for part in rows(others)))
    faulty = Faulty(devices[1])
    store = PrefixStore([devices[0], faulty], NAMES)  # type: ignore[list-item]
    assert store.blocks == 0 and holds(store, others, 0)
    store.store(NAMES.keys(tokens), *rows(tokens))
    assert PrefixStore(devices, shallow).match(shallow.keys(others)).tokens == 40
    faulty.refuses, faulty.left, faulty.times = KvAppend, 0, 2
    store = PrefixStore([devices[0], faulty], NAMES)  # type: ignore[list-item]
    store.store(NAMES.keys(others), *rows(others))
    assert holds(store, others, 40) and holds(store, tokens, 32) and store.evicted == 1
    assert PrefixStore(devices, shallow).blocks == 0


def test_rows_that_fail_verification_are_a_miss(devices) -> None:
    tokens = list(range(20))
    PrefixStore(devices, NAMES).store(NAMES.keys(tokens), *rows(tokens))
    swapped = PrefixStore(devices[::-1], NAMES)
    assert swapped.match(NAMES.keys(tokens)).tokens == 16
    assert holds(swapped, tokens, 0) and swapped.rejected == 1 and swapped.blocks == 0
    assert swapped.store(NAMES.keys(tokens), *rows(tokens)) == 2 and holds(swapped, tokens, 16)


def test_rows_of_another_worker_are_a_miss(devices) -> None:
    """Workers use the same keys; their drives may be listed in another order."""
    tokens = list(range(16))
    PrefixStore(devices, NAMES).store(NAMES.keys(tokens), *rows(tokens))
    another = PrefixStore(devices, replace(NAMES, rank=1))
    assert another.names.keys(tokens) == NAMES.keys(tokens) and another.match(NAMES.keys(tokens)).tokens == 16
    assert another.load(NAMES.keys(tokens)) is None and another.rejected == 1


def test_store_accepts_only_new_rows(devices) -> None:
    """Rows of stored blocks may be left out; a gap before the first row stores nothing."""
    store, tokens = PrefixStore(devices, NAMES), list(range(48))
    keys, (k, v) = NAMES.keys(tokens), rows(tokens)
    assert store.store(keys[:2], k, v) == 2
    assert store.store(keys, k[:, 24:], v[:, 24:], first=24) == 0, "the third block is nowhere"
    assert store.store(keys, k[:, 8:], v[:, 8:], first=8) == 4 and holds(store, tokens, 48)
    assert store.take_changes() == dict.fromkeys(keys, True) and not store.take_changes()


def test_large_prompts_take_several_commands(devices, monkeypatch) -> None:
    for most in (4 * 16 * 2 * 20, 4 * 16 * 2 * 3):  # bytes of 20 rows and of 3
        monkeypatch.setattr("host_driver.prefixes.store.COMMAND_BYTES", most)
        store, tokens = PrefixStore(devices, NAMES), [most, *range(40)]
        store.store(NAMES.keys(tokens), *rows(tokens))
        assert holds(store, tokens, 40) and holds(store, tokens[:17], 16)


def test_names_depend_on_all_that_k_and_v_depend_on() -> None:
    tokens = list(range(20))
    fields = {"model": OTHER, "salt": "s", "seed": 1, "layout": 16}
    others = [replace(NAMES, **{name: value}) for name, value in fields.items()]  # type: ignore[arg-type]
    others += [replace(NAMES, drives=1), replace(NAMES, shape=replace(SHAPE, layers=3))]
    names = [prefix_names.keys(tokens)[-1] for prefix_names in (NAMES, *others)] + [NAMES.keys(tokens, extra="x")[-1]]
    assert len(set(names)) == len(names)
    assert NAMES.keys(tokens) == replace(NAMES).keys(tokens) == NAMES.keys(tokens, first_keys=NAMES.keys(tokens[:9]))
    assert NAMES.keys([1, *tokens[1:]])[1] != NAMES.keys(tokens)[1], "a key stands for all tokens before it"


def test_admission_counts_requests_of_a_key() -> None:
    admission = AdmissionFilter(after=2, remembered=3)
    keys = [bytes([n]) * 16 for n in range(4)]
    admission.record(keys[:2])
    assert admission.admitted(keys) == 0
    admission.record(keys[:3])
    assert admission.admitted(keys) == 2
    admission.record(keys[3:])
    admission.record(keys[3:])
    assert admission.admitted(keys) == 2 and admission.admitted(keys[3:]) == 1, "the third was forgotten"
    assert AdmissionFilter().admitted(keys) == 4


def test_invalid_settings_are_refused(devices) -> None:
    with pytest.raises(ValueError, match="block_tokens = 0"):
        replace(NAMES, block_tokens=0)
    assert replace(NAMES, block_tokens=1).block_tokens == 1
    with pytest.raises(ValueError, match="1 drives: the names are for 2"):
        PrefixStore(devices[:1], NAMES)
    with pytest.raises(ValueError, match="max_blocks = 0"):
        PrefixStore(devices, NAMES, 0)
    with pytest.raises(ValueError, match="admit_after = 0"):
        AdmissionFilter(0)
    with pytest.raises(ValueError, match="5 blocks: must be at most max_blocks = 2"):
        PrefixStore(devices, NAMES, 2).store(NAMES.keys(list(range(40))), *rows(list(range(40))))


def test_store_fills_last_block_evicts_all_keys(devices) -> None:
    store = PrefixStore(devices, NAMES, max_blocks=3)
    first, second = list(range(24)), list(range(100, 124))
    before = set(list_keys(devices[0]))
    assert store.store(NAMES.keys(first), *rows(first)) == 3
    of_first = set(list_keys(devices[0])) - before
    assert store.store(NAMES.keys(second), *rows(second)) == 3 and store.evicted == 3
    assert len(of_first) == 7 and len(of_first & set(list_keys(devices[0]))) == 1, "the manifest's alone"
