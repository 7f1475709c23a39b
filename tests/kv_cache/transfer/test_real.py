"""Real bytes under random programs and under faults: a copy delivers the source's bytes, or an error.

partner of: kv_cache/transfer/real.py, kv_cache/replay.py, kv_cache/limits.py
"""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from csd_io.queue import aligned
from kv_cache import (
    DEVICE,
    DIRECT,
    HOST,
    PAGE_CACHE,
    POLICIES,
    Iteration,
    IterationRunner,
    Policy,
    PolicyError,
    Program,
)
from kv_cache.block_table import BlockKey
from kv_cache.limits import TierLimits
from kv_cache.policies import moves_blocks, policy_of
from kv_cache.replay import replay
from kv_cache.transfer import real as real_module
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.frames import CachedFiles, Memory, MemoryFrame
from kv_cache.transfer.real import RealTransfer, RealTransfers
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

ROW = 512
LAYERS, TOKENS = 4, 40


class Flaky(Memory):
    """A tier that fails on request: `fails` is called with the operation; it may raise, sleep, or do nothing."""

    def __init__(self, fails):  # type: ignore[no-untyped-def]
        self.fails = fails

    def frame(self, block, nbytes):  # type: ignore[no-untyped-def]
        return FlakyFrame(self, block, aligned(nbytes))


class FlakyFrame:
    def __init__(self, store, block, buffer):  # type: ignore[no-untyped-def]
        self.owner, self.block, self.buffer = store, block, buffer

    def view(self, at: int, nbytes: int) -> None:
        return None

    def trim(self, nbytes: int) -> None:
        pass

    def load(self, at: int, into: memoryview) -> None:
        self.owner.fails("load", self.block)
        into[:] = self.buffer[at : at + len(into)]

    def store(self, at: int, data: memoryview) -> None:
        self.owner.fails("store", self.block)
        self.buffer[at : at + len(data)] = data

    def free(self) -> None:
        self.buffer[:] = b"\xee" * len(self.buffer)  # later readers see these bytes


class Poisoned(Memory):
    """Memory that is overwritten when it is freed: any later access is an error."""

    def frame(self, block, nbytes):  # type: ignore[no-untyped-def]
        return PoisonedFrame(nbytes)


class PoisonedFrame(MemoryFrame):
    gone = False

    def view(self, at: int, nbytes: int) -> memoryview:
        assert not self.gone, "a frame is used that was given up"
        return super().view(at, nbytes)

    def free(self) -> None:
        self.view(0, self._size)[:] = b"\xee" * self._size
        self.gone = True


class Model:
    """Imitates a model: writes new rows where they are created, and checks all rows that it attends."""

    def __init__(self, policy: Program, tiers: TierLimits, cache: int, fails=lambda what, block: None) -> None:  # type: ignore[no-untyped-def]
        stores = {DEVICE: Poisoned(), HOST: Poisoned(), PAGE_CACHE: Flaky(fails), DIRECT: Flaky(fails)}
        self.expected: dict[BlockKey, bytearray] = {}
        self.real = RealTransfers(stores, lambda block: -(-(TOKENS + 8) * ROW // 4096) * 4096, self.attends)
        machine = tiers.machine(cache)
        self.run = IterationRunner(machine, range(LAYERS), policy, self.real, final_tokens=TOKENS + 8, recorded=[])
        self.draw = random.Random(7)

    def attends(self, attention: AttendCall) -> None:
        for block in attention.blocks:
            data = self.expected.setdefault(block, bytearray())
            frame = self.real.frame(block, DEVICE)
            new = self.draw.randbytes(self.run.table[block].tokens * ROW - len(data))
            frame.store(len(data), memoryview(new))
            data += new
            there = bytearray(len(data))
            frame.load(0, memoryview(there))
            assert there == data, f"{block} has other bytes"

    def iterations(self, steps: int = 5) -> None:
        for new in (TOKENS, *[1] * steps):
            self.run.run({"r": new}, {"r": ROW})
            self.run.table.check()
        self.real.settle()


LAYER = 2 * ROW * (TOKENS + 8)


@pytest.mark.parametrize("name", list(filter(moves_blocks, POLICIES)))
@pytest.mark.parametrize("device", [1, 2, 9])
@pytest.mark.parametrize("host", [0, 2])
def test_real_bytes_equal_simulated_bytes(name: str, device: int, host: int) -> None:
    model = Model(policy_of(name).layers, TierLimits(device * LAYER, host * LAYER), 2 * LAYER)
    model.iterations()
    modelled = SimulatedTransfers(model.run.machine, lambda attention: LayerTime(0))
    replay(model.run.recorded or [], model.run.machine, modelled, model.run)
    assert modelled.moved == model.real.moved
    for tier, limit in ((DEVICE, device), (HOST, host)):
        assert model.run.table.peak[tier] <= limit * LAYER
    model.real.close()


class Wanders(Policy):
    """Random acts that a table allows, drawn in each iteration."""

    def __init__(self, seed: int) -> None:
        self.draw, self.refused = random.Random(seed), 0

    def layers(self, it: Iteration) -> None:
        draw = self.draw
        for layer in it.layers:
            for block in it.blocks(layer):
                it.copy(block, DEVICE, urgency=draw.random())
            it.attend(layer)
            for block in [x for number in it.layers for x in it.blocks(number)]:
                act = draw.choice([it.copy, it.move, it.drop, it.drop])
                tier = draw.choice([HOST, PAGE_CACHE, DIRECT, DEVICE])
                try:
                    act(block, tier)
                except PolicyError:
                    self.refused += 1


@pytest.mark.parametrize("seed", range(5))
def test_random_policy_slow_files_bytes_right(seed: int) -> None:
    draw, lock = random.Random(seed), threading.Lock()

    def slow(what: str, block: BlockKey) -> None:
        with lock:
            seconds = draw.choice([0, 0, 0.002])
        time.sleep(seconds)

    policy = Wanders(seed)
    model = Model(policy.layers, TierLimits(), 2 * LAYER, slow)
    model.iterations(steps=8)
    assert policy.refused > 0
    model.real.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", ["load", "store"])
@pytest.mark.parametrize("name", ["flexgen", "dual-blade", "split", "reactive", "tutti", "preload"])
def test_a_file_that_fails_is_one_clear_error(name: str, what: str, code: int) -> None:
    count = 0

    def fails(done: str, block: BlockKey) -> None:
        nonlocal count
        count += done == what
        if done == what and count == 5:
            raise OSError(code, os.strerror(code), f"/disk: {block}")

    model = Model(policy_of(name).layers, TierLimits(LAYER, 0), LAYER, fails)
    with pytest.raises(OSError, match=r"/disk: [kv] of request r, layer") as raised:
        model.iterations()
    assert raised.value.errno == code
    model.real.close()


def test_copy_after_failed_copy_is_not_started() -> None:
    """The copy to disk fails; the copy back returns the error, not the frame's former bytes."""

    def fails(what: str, block: BlockKey) -> None:
        if what == "store" and block.layer == 1:
            time.sleep(0.05)
            raise OSError(errno.EIO, "broken", "/disk")

    failed = []

    def there_and_back(t: Iteration) -> None:
        for layer in t.layers:
            t.attend(layer)
        for block in t.blocks(1):
            t.move(block, DIRECT)
            transfer = t.move(block, DEVICE)
            with pytest.raises(OSError, match="broken"):
                t.wait(transfer)
            failed.append(block)

    model = Model(there_and_back, TierLimits(), LAYER, fails)
    model.run.run({"r": TOKENS}, {"r": ROW})
    assert len(failed) == 2
    model.real.close()


def test_page_cache_hits_as_kernel_reports(tmp_path: Path) -> None:
    files = CachedFiles(tmp_path)
    real = RealTransfers({PAGE_CACHE: files, HOST: Memory()}, lambda block: 4096, lambda attention: None)
    frame = files.frame(BlockKey("r", 0), 4096)
    frame.store(0, aligned(4096))
    frame.load(0, aligned(4096))
    assert real.page_cache_hits(PAGE_CACHE) in ((4096, 4096), None)
    assert real.page_cache_hits(HOST) is None
    frame.free()


def test_layer_with_failed_copy_is_not_attended() -> None:
    def fails(what: str, block: BlockKey) -> None:
        if what == "load" and block.layer == 2:
            raise OSError(errno.EIO, "broken", "/disk")

    def all_at_once(t: Iteration) -> None:
        transfers = [t.copy(x, DEVICE) for layer in t.layers for x in t.blocks(layer)]
        while not all(transfer is None or transfer.done for transfer in transfers):
            time.sleep(0.001)
        for layer in t.layers:
            t.attend(layer)
        for layer in t.layers:
            for x in t.blocks(layer):
                t.move(x, DIRECT)

    model = Model(all_at_once, TierLimits(), LAYER, fails)
    with pytest.raises(OSError, match="broken"):
        model.iterations()
    model.real.close()


def test_block_reuse_failed_transfer_spares_new_owner() -> None:
    def fails(what: str, block: BlockKey) -> None:
        if what == "store" and block.request == "a":
            time.sleep(0.05)
            raise OSError(errno.EIO, "broken", "/disk")

    def through_the_disk(t: Iteration) -> None:
        for layer in t.layers:
            for x in t.blocks(layer):
                t.copy(x, DEVICE)
            t.attend(layer)
            for x in t.blocks(layer):
                t.move(x, DIRECT)

    model = Model(through_the_disk, TierLimits(LAYER, 0), LAYER, fails)
    model.run.run({"a": TOKENS}, {"a": ROW})
    for new in (TOKENS, 1, 1):
        model.run.run({"b": new}, {"b": ROW})  # it waits for the room of a's last layer
    with pytest.raises(OSError, match="broken"):
        model.run.run({"a": 1}, {"a": ROW})
    model.run.free("a")
    model.run.run({"b": 1}, {"b": ROW})
    model.run.table.check()
    model.real.close()


def test_copy_that_cannot_start_is_not_recorded() -> None:
    class Full(Memory):
        def frame(self, block, nbytes):  # type: ignore[no-untyped-def]
            raise OSError(errno.EMFILE, "too many open files", "/disk")

    def goes_on(t: Iteration) -> None:
        for layer in t.layers:
            t.attend(layer)
        for x in t.blocks(0):
            with pytest.raises(OSError, match="too many"):
                t.move(x, HOST)
            with pytest.raises(PolicyError, match="no route"):
                t.copy(x, HOST, source=PAGE_CACHE)
            with pytest.raises(ValueError, match="float"):
                t.copy(x, PAGE_CACHE, urgency="much")  # type: ignore[arg-type]
            assert t.tiers_of(x) == (DEVICE,)

    model = Model(goes_on, TierLimits(), LAYER)
    model.real.stores[HOST] = Full()  # type: ignore[index]
    model.run.run({"r": TOKENS}, {"r": ROW})
    model.run.table.check()
    model.real.close()


def test_failed_thread_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(policy_of("flexgen").layers, TierLimits(), LAYER)

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(OSError, match="cannot start a copy thread: can't start new thread"):
            model.iterations()
    model.run.free("r")
    model.expected.clear()
    model.iterations()
    model.real.close()


def test_ended_copies_are_not_retained() -> None:
    """Whatever is retained of copies, it does not become more with every iteration."""
    model = Model(policy_of("dual-blade").layers, TierLimits(2 * LAYER, 0), 2 * LAYER)

    def copies() -> int:
        gc.collect()
        return sum(type(instance) is RealTransfer for instance in gc.get_objects())

    model.iterations(steps=3)
    before = copies()
    for _ in range(5):
        model.run.run({"r": 1}, {"r": ROW})
    model.real.settle()
    assert copies() < before + 2 * LAYERS  # of 5 * 4 * LAYERS; each thread still knows its last one
    model.real.close()


def test_policy_reads_layer_time_but_cannot_move_new_rows() -> None:
    over: list[tuple[float, Iteration]] = []

    def asks(t: Iteration) -> None:
        with pytest.raises(TypeError):
            t.new["r"] = 0  # type: ignore[index]
        with pytest.raises(PolicyError, match="'soon' is not a transfer"):
            t.wait("soon")  # type: ignore[arg-type]
        for layer in t.layers:
            t.attend(layer)
        over.append((t.layer_s(), t))

    model = Model(asks, TierLimits(), LAYER)
    model.run.run({"r": TOKENS}, {"r": ROW})
    ((took_s, iteration),) = over
    assert took_s > 0
    with pytest.raises(PolicyError, match="iteration 0 is over"):
        iteration.attend(0)
    model.real.close()


def test_crop_releases_memory() -> None:
    real = RealTransfers({HOST: Memory()}, lambda block: 1 << 26, lambda attention: None)
    x = BlockKey("r", 0)

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    frame = real.frame(x, HOST)
    frame.store(0, memoryview(bytes(1 << 26)))
    before = resident()
    real.crop(x, 5000)
    assert resident() < before - (50 << 20)
    real.close()


def test_frames_are_freed_with_their_request() -> None:
    model = Model(policy_of("flexgen").layers, TierLimits(), LAYER)
    model.iterations()
    model.run.free("r")
    model.real.forget("r")
    assert not model.real.frames
    model.real.close()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": -1}, "device = -1: must be a whole number, at least 0"),
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ({"host": True}, "host = True: must be a whole number"),
        ({"page_cache": 1.5}, "page_cache = 1.5: must be a whole number"),
        ({"files": "/tmp"}, "files = '/tmp': must be a pathlib.Path"),
    ],
)
def test_invalid_tier_limits_are_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TierLimits(**given)  # type: ignore[arg-type]


def test_close_frees_frames_copies_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    freed, numbers, begin = list[object](), list[int](), RealTransfers.begin

    def numbered(self: RealTransfers, *given: object) -> RealTransfer:
        copy = begin(self, *given)  # type: ignore[arg-type]  # as given
        numbers.append(copy.number)
        return copy

    monkeypatch.setattr(RealTransfers, "begin", numbered)
    model = Model(policy_of("dual-blade").layers, TierLimits(2 * LAYER, 0), 2 * LAYER)
    model.iterations(steps=3)
    model.real.settle()
    frames = list(model.real.frames.values())
    for kind in {type(frame) for frame in frames}:
        monkeypatch.setattr(kind, "free", lambda self, free=kind.free: (freed.append(self), free(self)))
    model.real.close()
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 2
    assert frames and {id(frame) for frame in frames} <= {id(freed_frame) for freed_frame in freed}


def test_copies_use_a_bounce_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[object] = []
    move = real_module.move

    def moved(source: object, target: object, first: int, end: int, bounce: Callable[[], memoryview]) -> None:
        buffers.append(bounce())
        move(source, target, first, end, bounce)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(real_module, "move", moved)
    model = Model(policy_of("dual-blade").layers, TierLimits(2 * LAYER, 0), 2 * LAYER)
    model.iterations(steps=2)
    model.real.close()
    assert buffers and all(isinstance(buffer, memoryview) and len(buffer) >= ROW for buffer in buffers)
