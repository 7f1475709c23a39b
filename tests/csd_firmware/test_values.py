"""Values of tenants: each tenant has its own keys, quotas hold, a restart keeps flushed values."""

import os
import threading
from dataclasses import replace

import pytest

from csd_firmware import Firmware
from csd_firmware.tenants import Tenant
from csd_firmware.values import Values
from csd_spec import GetLog, KvList, LogPage, SeqCreate, SeqSweep, Status
from csd_spec.arrays import keys_of
from ftl import Ftl, KeyExistsError, MediaFailedError, Nand, OutOfSpaceError, UncorrectableReadError, UnknownKeyError

SECRET = b"secret"


@pytest.fixture
def firmware(small_drive):
    return Firmware(small_drive, Nand(small_drive.geometry))


@pytest.fixture
def values(firmware):
    return Values(firmware)


def restarted(firmware):
    return Firmware(firmware.spec, firmware.ftl.nand)


def test_stored_values_retrieve_list_and_delete(values):
    stored = {b"b": os.urandom(3000), b"a": b"", b"a\0": b"x", b"k" * 16: os.urandom(1024)}
    for key, value in stored.items():
        values.store(key, value)
    for key, value in stored.items():
        assert values.retrieve(key) == (value, len(value))
        assert values.retrieve(key, 700) == (value[:700], len(value))
        assert values.exist(key) == len(value)
    assert values.keys() == [b"a", b"a\0", b"b", b"k" * 16]
    assert values.keys(b"a\0", 2) == [b"a\0", b"b"]
    assert values.keys(b"aa") == [b"b", b"k" * 16]
    values.store(b"b", b"other")
    assert values.retrieve(b"b") == (b"other", 5)
    values.delete(b"b")
    assert values.keys() == [b"a", b"a\0", b"k" * 16]
    for request in (values.retrieve, values.exist, values.delete):
        with pytest.raises(UnknownKeyError):
            request(b"b")


def test_store_options_require_existing_or_new_key(values):
    with pytest.raises(UnknownKeyError):
        values.store(b"key", b"1", must_exist=True)
    values.store(b"key", b"2", must_be_new=True)
    with pytest.raises(KeyExistsError):
        values.store(b"key", b"3", must_be_new=True)
    values.store(b"key", b"4", must_exist=True)
    assert values.retrieve(b"key") == (b"4", 1)
    for must_exist, error in ((b"key", KeyExistsError), (b"no key", UnknownKeyError)):
        with pytest.raises(error):
            values.store(must_exist, b"5", must_exist=True, must_be_new=True)
    assert values.keys() == [b"key"]


def test_power_loss_keeps_flushed_values(values, firmware):
    values.store(b"kept", b"old" * 400)
    values.store(b"deleted", b"too late")
    values.flush()
    values.store(b"kept", b"new" * 400)
    values.store(b"unflushed", b"gone")
    values.delete(b"deleted")
    again = Values(restarted(firmware))
    assert again.retrieve(b"kept")[0] in (b"old" * 400, b"new" * 400), "one of them as a whole"
    values.flush()
    again = Values(restarted(firmware))
    assert again.retrieve(b"kept") == (b"new" * 400, 1200)
    assert again.keys() == [b"kept", b"unflushed"]


def test_values_are_separate_between_tenants(firmware):
    alice, bob = (Values(firmware, name) for name in ("alice", "bob"))
    tenant = Tenant(firmware, SECRET, "alice")
    alice.store(b"key", b"alice's")
    bob.store(b"key", b"bob's")
    bob.store(b"k" * 16, b"more")
    assert (alice.keys(), bob.keys()) == ([b"key"], [b"key", b"k" * 16])
    assert tenant.step(SeqSweep(), 0).data[0].tolist() == [0], "a value is no sequence without a name"
    assert not tenant.step(KvList(keys_of([bytes(16)]), 5), 0).data[1].any()
    alice.delete(b"key")
    assert bob.retrieve(b"key") == (b"bob's", 5)
    with pytest.raises(UnknownKeyError):
        alice.retrieve(b"key")


def test_quota_counts_values_and_sequences_together(small_drive):
    firmware = Firmware(replace(small_drive, dram_bytes=64 << 10))
    tenants = [Tenant(firmware, SECRET, name, 0.25) for name in ("alice", "bob")]
    alice, bob = (Values(firmware, name) for name in ("alice", "bob"))
    page_bytes = small_drive.geometry.page_bytes
    assert alice.max_value_bytes == alice.size_bytes == 112 * page_bytes
    alice.store(b"big", bytes(50 * page_bytes))
    with pytest.raises(OutOfSpaceError, match="64 more flash pages: tenant alice uses 50 of its quota of 112"):
        alice.store(b"more", bytes(64 * page_bytes))
    alice.store(b"big", bytes(100 * page_bytes))  # in place of the first
    assert (alice.used_bytes, bob.used_bytes) == (100 * page_bytes, 0)
    bob.store(b"big", bytes(100 * page_bytes))
    assert alice.max_keys == 64, "a sixteenth of drive DRAM for names, 64 bytes each"
    count = 0
    with pytest.raises(OutOfSpaceError, match="1 more names: tenant alice uses 64 of its quota of 64"):
        while True:
            alice.store(b"%d" % count, b"")
            count += 1
    assert count == 63
    alice.store(b"1", b"")  # an overwrite needs no name
    done = tenants[1].step(SeqCreate(1, 1, 1, 8, 64), 0)
    assert done.status is Status.SUCCESS, "another's values leave a tenant its share"
    with pytest.raises(OutOfSpaceError):
        Values(restarted(firmware)).store(b"all", bytes(small_drive.geometry.capacity_bytes))


def test_logs_count_value_requests_and_refusals(values, firmware, small_drive):
    values.store(b"key", bytes(5000))
    values.retrieve(b"key")
    with pytest.raises(OutOfSpaceError):
        values.store(b"key", bytes(small_drive.geometry.capacity_bytes))
    history = firmware.state.history
    assert history.errors[0]["command"] == "Store"
    assert history.errors[0]["status_field"] == Status.CAPACITY_EXCEEDED
    assert {kind: history.latency[kind].requests for kind in ("Store", "Retrieve")} == {"Store": 1, "Retrieve": 1}
    assert (firmware.ftl.counters.host_writes, firmware.ftl.counters.host_reads) == (1, 1)
    assert firmware.step(GetLog(LogPage.SMART), 0).status is Status.SUCCESS


def test_lost_value_is_reported_and_deletable(values, firmware):
    values.store(b"key", bytes(5000))
    (seq,) = firmware.ftl.sequences.values()
    seq.failed = True
    with pytest.raises(UncorrectableReadError):
        values.retrieve(b"key")
    assert values.exist(b"key") == 5000
    values.store(b"key", b"again")
    assert values.retrieve(b"key") == (b"again", 5)


def test_an_exception_in_a_store_fails_the_drive(values, firmware, monkeypatch):
    values.store(b"key", b"kept")
    values.flush()
    monkeypatch.setattr(Ftl, "name", lambda self, *named: 1 / 0)
    with pytest.raises(MediaFailedError, match="ZeroDivisionError"):
        values.store(b"key", b"other")
    with pytest.raises(MediaFailedError):
        values.delete(b"key")
    assert values.retrieve(b"key") == (b"kept", 4)
    assert Values(restarted(firmware)).keys() == [b"key"]


def test_format_deletes_values(values, firmware):
    values.store(b"key", b"value")
    firmware.format()
    assert values.keys() == []
    values.store(b"key", b"again")
    assert values.retrieve(b"key") == (b"again", 5)


def test_value_requests_of_tenants_take_turns(firmware):
    lock = threading.Lock()
    values = Values(firmware, turns=lock)
    values.store(b"key", b"value")
    with lock:
        waiting = threading.Thread(target=values.retrieve, args=(b"key",))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join()
