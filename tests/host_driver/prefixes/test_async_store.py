"""Loads and stores during a server's work, over drives in processes of their own: nothing wrong is found after any
process dies.

partner of: host_driver/prefixes/async_store.py
"""

import os
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from csd_firmware import InProcessDrive
from csd_link.connect import connect
from csd_link.doorbell import SocketDoorbell, call
from csd_link.host_end import DriveLostError, WindowDrive
from csd_link.medium import MappedMedium
from csd_link.run_dir import doorbell_path, window_path
from csd_spec import Flush, KvExist, Status
from csd_spec.arrays import keys_of
from host_driver.prefixes.async_store import COUNTS, AsyncPrefixStore, connected
from host_driver.prefixes.store import PrefixStore
from tests.host_driver.prefixes.prompts import BLOCK, NAMES, holds, right, rows
from tests.served import HANG_S, kill, serving, until, window_of

TOKENS = list(range(40))
HOST = Path(__file__).with_name("killed_host.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.fixture
def names(tmp_path):
    """Names of two drives that no other test uses."""
    return [f"{tmp_path.name}-{number}" for number in range(2)]


def opening(names, tenant="default", **options):
    return partial(connected, [window_of(name, tenant) for name in names], NAMES, **options)


def load(keeper, tokens):
    return keeper.load(NAMES.keys(tokens)).result(timeout=HANG_S)


def store(keeper, tokens):
    return keeper.store(NAMES.keys(tokens), lambda: rows(tokens))


@pytest.fixture
def drives(small_drive):
    made = [InProcessDrive(small_drive) for _ in range(2)]
    yield made
    for device in made:
        device.close()


def test_stored_prefix_is_loaded_and_counted(drives):
    keeper = AsyncPrefixStore(lambda: PrefixStore(drives, NAMES))
    assert load(keeper, TOKENS) is None and store(keeper, TOKENS)
    until(lambda: right(load(keeper, TOKENS), TOKENS, 40))
    assert keeper.take_changes() == dict.fromkeys(NAMES.keys(TOKENS), True)
    counts = keeper.take_counts()
    assert set(counts) <= set(COUNTS)
    assert (counts["stored_blocks"], counts["stores"]) == (5, 1)
    assert counts["loaded_tokens"] == 40 and counts["loads"] == counts["loads_failed"] + 1
    assert not keeper.take_changes() and not keeper.take_counts().get("loads")
    assert keeper.pin(NAMES.keys(TOKENS)[4:]) and not keeper.remove(NAMES.keys(TOKENS)).result(60)
    assert keeper.unpin(NAMES.keys(TOKENS)[4:]) and keeper.remove(NAMES.keys(TOKENS)[3:]).result(60)
    assert right(load(keeper, TOKENS), TOKENS, 24)
    assert keeper.take_changes() == dict.fromkeys(NAMES.keys(TOKENS)[3:], False)
    keeper.close()
    assert load(keeper, TOKENS) is None and not store(keeper, TOKENS), "nobody waits for what is closed"


class Slow(PrefixStore):
    """A store whose first `store` blocks until `go` is set."""

    def __init__(self, devices):
        super().__init__(devices, NAMES)
        self.go, self.began = threading.Event(), threading.Event()

    def store(self, *args):
        self.began.set()
        self.go.wait(HANG_S)
        return super().store(*args)


def test_stores_beyond_queue_are_dropped_without_waiting(drives):
    slow = Slow(drives)
    keeper = AsyncPrefixStore(lambda: slow, stores_in_flight=2)
    prompts = [[n, *TOKENS] for n in range(5)]
    assert store(keeper, prompts[0])
    slow.began.wait(HANG_S)
    assert [store(keeper, prompt) for prompt in prompts[1:]] == [True, True, False, False]
    assert not keeper.store(NAMES.keys(TOKENS), lambda: pytest.fail("rows of what is dropped are not asked for"))
    loaded = keeper.load(NAMES.keys(prompts[0]))
    slow.go.set()
    assert right(loaded.result(60), prompts[0], 40), "a load does not wait for stores that have not begun"
    keeper.close()
    assert keeper.take_counts()["stores_dropped"] == 3 and slow.blocks == 15


def test_store_queued_at_close_is_dropped(drives):
    keeper = AsyncPrefixStore(lambda: PrefixStore(drives, NAMES))

    def slow():
        keeper.close()
        return rows(TOKENS)

    assert not keeper.store(NAMES.keys(TOKENS), slow)
    assert keeper.take_counts()["stores_dropped"] == 1


def test_internal_error_is_logged_and_ends_waits(drives, caplog):
    store_of = PrefixStore(drives, NAMES)
    keeper = AsyncPrefixStore(lambda: store_of)
    assert keeper.load(None).result(60) is None
    until(lambda: keeper.take_counts().get("drives_lost"))
    assert "unexpected error" in caplog.text
    keeper.close()


def test_killed_drive_fails_loads_keeps_stored(tmp_path, names):
    with serving(tmp_path, *names, flash=tmp_path):
        keeper = AsyncPrefixStore(opening(names))
        store(keeper, TOKENS)
        until(lambda: right(load(keeper, TOKENS), TOKENS, 40))
        keeper.take_changes()
        until(lambda: not keeper._has_work())
        assert right(load(keeper, TOKENS), TOKENS, 40)  # after the flush in progress
        kill(names[1])
        assert load(keeper, TOKENS) is None
        assert keeper.take_changes() == dict.fromkeys(NAMES.keys(TOKENS), False)
        until(lambda: keeper.take_changes() == dict.fromkeys(NAMES.keys(TOKENS), True))
        assert right(load(keeper, TOKENS), TOKENS, 40)
        keeper.close()


def test_window_taken_by_other_host_is_not_reclaimed(tmp_path, names, caplog):
    with serving(tmp_path, *names):
        keeper = AsyncPrefixStore(opening(names))
        store(keeper, TOKENS)
        until(lambda: right(load(keeper, TOKENS), TOKENS, 40))
        window = window_path(names[0])
        line = call(doorbell_path(window))  # as a host that sees no lock
        thief = WindowDrive(MappedMedium(window), SocketDoorbell(line), line.close)
        assert load(keeper, TOKENS) is None
        assert (
            "another host has taken its window: process" in caplog.text
            and "until this engine is restarted" in caplog.text
        )
        keeper._reopen()
        assert keeper._store is None and thief.submit(Flush(), 0).result().status is Status.SUCCESS
        thief.close()
        keeper.close()


def test_random_drive_kills_never_return_wrong_rows(tmp_path, names):
    draw = random.Random(0)
    prompts = [[draw.randrange(100) for _ in range(draw.randint(10, 60))] for _ in range(6)]
    prompts += [prompt[: draw.randint(8, 30)] + [draw.randrange(100) for _ in range(20)] for prompt in prompts]
    with serving(tmp_path, *names, flash=tmp_path):
        keeper, result = AsyncPrefixStore(opening(names), stores_in_flight=100), 0
        for turn in range(12):
            loads = []
            for choice in draw.choices(prompts, k=6):
                store(keeper, choice)
                loads.append((choice, keeper.load(NAMES.keys(choice))))
            if turn % 3 == 2:
                kill(draw.choice(names))
            for tokens, future in loads:
                got = future.result(60)
                result += got is not None
                assert got is None or right(got, tokens, got[0].shape[1])
        until(lambda: keeper._store is not None)
        store(keeper, prompts[0])
        until(lambda: right(load(keeper, prompts[0]), prompts[0], len(prompts[0]) // BLOCK * BLOCK))
        counts = keeper.take_counts()
        assert result and counts["drives_lost"] and not counts["rejected"], "names are of what is there"
        keeper.close()


def test_prefixes_survive_restart_of_host_and_drives(tmp_path, names):
    with serving(tmp_path, *names, flash=tmp_path):
        keeper = AsyncPrefixStore(opening(names))
        store(keeper, TOKENS)
        keeper.close()
    with serving(tmp_path, *names, flash=tmp_path):
        keeper = AsyncPrefixStore(opening(names))
        assert keeper.take_changes() == dict.fromkeys(NAMES.keys(TOKENS), True)
        assert right(load(keeper, TOKENS), TOKENS, 40)
        keeper.close()


def test_unreachable_drives_fail_at_start(names):
    with pytest.raises(DriveLostError, match="no drive is served"):
        AsyncPrefixStore(opening(names))
    with pytest.raises(ValueError, match="stores_in_flight = 0"):
        AsyncPrefixStore(opening(names), 0)


@pytest.mark.parametrize(("command", "left"), [("KvAppend", 0), ("KvAppend", 1), ("KvName", 0)])
def test_host_killed_before_naming_leaves_nothing(tmp_path, names, command, left):
    with serving(tmp_path, *names, tenants=("alice", "bob")):
        died = subprocess.run([sys.executable, str(HOST), command, str(left), "alice", *names], env=ENVIRONMENT)
        assert died.returncode == -signal.SIGKILL
        stored = connected([window_of(name, "alice") for name in names], NAMES)
        assert stored.blocks == 2 and holds(stored, TOKENS, 16)
        stored.store(NAMES.keys(TOKENS), *rows(TOKENS))
        assert holds(stored, TOKENS, 40)
        for device in stored.devices:
            device.close()


def test_tenants_share_drives_and_no_keys(tmp_path, names):
    with serving(tmp_path, *names, tenants=("alice", "bob")):
        alice, bob = AsyncPrefixStore(opening(names, "alice")), AsyncPrefixStore(opening(names, "bob", max_blocks=3))
        store(alice, TOKENS)
        until(lambda: right(load(alice, TOKENS), TOKENS, 40))
        assert load(bob, TOKENS) is None and not bob.take_changes()
        other = TOKENS[::-1]
        store(bob, other[:24])
        until(lambda: right(load(bob, other), other, 24))
        assert load(alice, other) is None
        store(bob, TOKENS[:24])  # its own copy, for which its own go
        until(lambda: right(load(bob, TOKENS), TOKENS, 24))
        assert load(bob, other) is None and right(load(alice, TOKENS), TOKENS, 40)
        bob.close()
        with_window = connect(window_of(names[0], "bob").args[0])
        handles = with_window.submit(KvExist(keys_of(NAMES.keys(TOKENS))), 0).result().data[0]
        assert (handles != 0).tolist() == [True, True, True, False, False], "three blocks of bob's own, none of alice's"
        with_window.close()
        alice.close()
