"""Mooncake's objects are counted as they are read; a lost drive, or one that holds other bytes, is detected."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from csd_link.run_dir import pid_path
from tests.real import mooncake_guest, mooncake_run
from tests.real.mooncake_guest import exercise
from tests.real.mooncake_run import RepeatedKiller, offload
from tests.served import HANG_S


class Store:
    """A store whose memory holds four objects; an object reaches the disk at the second query for it."""

    def __init__(self, spoiled=None):
        self.memory, self.disk, self.looked, self.spoiled = {}, {}, set(), spoiled

    def put(self, key, data):
        self.memory[key] = data
        self.memory = dict(list(self.memory.items())[-4:]) if len(self.memory) > 40 else self.memory
        self.disk[key] = self.spoiled(key, data) if self.spoiled else data
        return 0

    def put_batch(self, keys, data):
        return next((code for code in map(self.put, keys, data) if code), 0)

    def get_batch(self, keys):
        return [self.get(key) for key in keys]

    def get(self, key):
        return self.memory.get(key) or self.disk.get(key) or b""

    def remove(self, key, force):
        self.memory.pop(key, None)
        return 0 if self.disk.pop(key, None) is not None else -1

    def get_replica_desc(self, key):
        places = [("memory", key in self.memory), ("disk", key in self.looked)]
        self.looked.add(key)
        return [
            SimpleNamespace(
                is_memory_replica=lambda at=at: at == "memory", is_local_disk_replica=lambda at=at: at == "disk"
            )
            for at, there in places
            if there
        ]

    def batch_get_replica_desc(self, keys):
        return {key: self.get_replica_desc(key) for key in keys}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(mooncake_guest, "SIZES", {100: 3, 5000: 1})
    monkeypatch.setattr(mooncake_guest, "WAVE_BYTES", 50_000)
    monkeypatch.setattr(mooncake_guest, "PATIENCE_S", 0.5)
    monkeypatch.setattr(mooncake_guest, "OFFLOAD_S", 0.05)
    monkeypatch.setattr(mooncake_guest, "_LOOK_S", 0.001)


def test_objects_read_back_mostly_from_disk():
    result = exercise(Store(), 300, 7)
    assert (result["objects"], result["wrong"], result["lost"]) == (300, 0, 0)
    assert result["removed"] > 0 and result["evicted"] > 200 and result["read_while_written"] > 20


@pytest.mark.parametrize(
    ("spoiled", "key"), [(lambda key, data: b"x" + data[1:], "wrong"), (lambda key, data: b"", "lost")]
)
def test_lost_or_wrong_objects_are_counted(spoiled, key):
    spoil = iter(range(300))
    store = Store(lambda name, data: spoiled(name, data) if next(spoil) in (5, 6) else data)
    result = exercise(store, 300, 7)
    assert 0 < result[key] <= 4


def test_failed_offload_is_retried():
    store, stuck, seen = Store(), {"object-7-13", "object-7-23"}, set()
    look, put = store.get_replica_desc, store.put

    def put_or_put_again(key, data):
        if key in seen:
            stuck.discard(key)
        seen.add(key)
        return put(key, data)

    store.put, store.get_replica_desc = put_or_put_again, lambda key: [] if key in stuck else look(key)
    result = exercise(store, 300, 7)
    assert (result["put_again"], result["wrong"], result["lost"]) == (2, 0, 0)


def test_kills_stop_at_end_of_run(own_run_dir, monkeypatch):
    """One kill was asked for: a second drive process survives."""
    monkeypatch.setattr(mooncake_run, "BOOTS_S", 0.01)
    monkeypatch.setattr(mooncake_run, "BETWEEN_S", 0.01)
    victims = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    file = pid_path("csd0")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(victims[0].pid))
    killer = RepeatedKiller(1)
    killer.begin(["csd0", "csd1"])
    assert victims[0].wait(HANG_S) == -signal.SIGKILL
    file.write_text(str(victims[1].pid))
    time.sleep(0.1)
    killer.end()
    assert killer.done == 1 and victims[1].poll() is None
    os.kill(victims[1].pid, signal.SIGKILL)
    victims[1].wait()


def test_missing_mooncake_error_has_install_command(monkeypatch):
    monkeypatch.setattr(mooncake_run, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'vcsd\[mooncake\]'"):
        offload(1, 0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("guest_machine")
def test_mooncake_in_guest_reads_from_killed_drive(monkeypatch):
    if find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: pip install 'vcsd[mooncake]'")
    monkeypatch.setattr(mooncake_run, "BOOTS_S", 22.0)
    result = offload(200, 1, 1)
    assert (result["objects"], result["wrong"], result["lost"]) == (200, 0, 0)
    assert result["node"].startswith("ng")
