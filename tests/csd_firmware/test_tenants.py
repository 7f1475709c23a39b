"""Encrypted handles that only their tenant can use."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from csd_firmware import Firmware
from csd_firmware.folder import secret_of
from csd_firmware.tenants import HandleCipher, Tenant
from csd_spec import Flush, KvAppend, KvFree, KvRead, SeqCreate, Status

CREATE = SeqCreate(3, 1, 2, 16, 64)


@given(st.binary(min_size=1, max_size=32), st.text(max_size=10), st.integers(0, 2**64 - 1))
def test_handle_decrypts_to_its_number(secret, tenant, number):
    handles = HandleCipher(secret, tenant)
    assert handles.decrypt(handles.encrypt(number)) == number


def test_handles_differ_between_tenants_and_drives():
    ciphers = [HandleCipher(secret, name) for secret in (b"one", b"two") for name in ("alice", "bob")]
    handles = [maker.encrypt(number) for maker in ciphers for number in range(1, 2001)]
    assert len(set(handles)) == len(handles)
    ones = np.unpackbits(np.array(handles, np.uint64).view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.01
    near = sum(ciphers[0].decrypt(handle ^ 1 << bit) <= 2000 for handle in handles[:50] for bit in range(64))
    assert near == 0


def test_a_handle_of_another_tenant_is_unknown(small_drive):
    firmware = Firmware(small_drive)
    alice, bob = (Tenant(firmware, b"secret", name) for name in ("alice", "bob"))
    hers = alice.step(CREATE, 0).data[0].tolist()
    rows = np.ones((5, 2, 16), np.float16)
    assert alice.step(KvAppend((hers[0],), 0, np.array([5]), rows, rows), 0).status is Status.SUCCESS
    for handle in (*hers, 1, 2, 3):
        for command in (KvRead((handle,), 0), KvFree((handle,)), KvAppend((handle,), 0, np.array([5]), rows, rows)):
            done = bob.step(command, 7)
            assert (done.status, done.submit_ns, done.latency_ns, done.data) == (Status.UNKNOWN_SEQUENCE, 7, 0, ())
    assert alice.step(KvFree(tuple(hers)), 0).status is Status.SUCCESS
    assert alice.step(KvRead((hers[0],), 0), 0).status is Status.UNKNOWN_SEQUENCE


def test_handles_survive_restart_with_same_secret(small_drive, tmp_path):
    firmware = Firmware(small_drive)
    handle = Tenant(firmware, secret_of(tmp_path)).step(CREATE, 0).data[0].tolist()[1]
    firmware.step(Flush(), 0)
    again = Tenant(Firmware(small_drive, firmware.ftl.nand), secret_of(tmp_path))
    assert again.step(KvRead((handle,), 0), 0).status is Status.SUCCESS
    assert (tmp_path / "secret.bin").stat().st_mode & 0o777 == 0o600
    assert secret_of(None) != secret_of(None)


def test_number_lost_with_power_not_reused_by_old_tenant(small_drive):
    firmware = Firmware(small_drive)
    stale = Tenant(firmware, b"secret", "alice").step(CREATE, 0).data[0].tolist()[0]
    again = Firmware(small_drive, firmware.ftl.nand)
    alice, bob = (Tenant(again, b"secret", name) for name in ("alice", "bob"))
    his = bob.step(CREATE, 0).data[0].tolist()[0]
    assert again.ftl.sequences.keys() == firmware.ftl.sequences.keys()
    assert alice.step(KvRead((stale,), 0), 0).status is Status.UNKNOWN_SEQUENCE
    again.step(Flush(), 0)
    last = Firmware(small_drive, firmware.ftl.nand)
    assert Tenant(last, b"secret", "bob").step(KvRead((his,), 0), 0).status is Status.SUCCESS
    assert Tenant(last, b"secret", "alice").step(KvRead((stale,), 0), 0).status is Status.UNKNOWN_SEQUENCE


def test_simulated_clock_of_host_starts_at_attach(small_drive):
    firmware = Firmware(small_drive)
    rows = np.ones((100, 2, 16), np.float16)
    latencies = []
    for _ in range(2):
        tenant = Tenant(firmware, b"secret")
        tenant.attach()
        handle = tenant.step(CREATE, 0).data[0].tolist()[0]
        done = tenant.step(KvAppend((handle,), 0, np.array([100]), rows, rows), 10**6)
        assert done.submit_ns == 10**6
        latencies.append((done.latency_ns, done.breakdown_ns["queue"]))
    assert latencies[0] == latencies[1]


def test_sequence_tables_are_bounded_by_drive_dram(small_drive):
    tenant = Tenant(Firmware(small_drive), b"secret")
    done = tenant.step(SeqCreate(1 << 16, 256, 512, 16, 64), 0)
    assert done.status is Status.CAPACITY_EXCEEDED
    assert "tables" in done.reason


def test_refusal_names_handle_not_internal_number(small_drive):
    firmware = Firmware(small_drive)
    alice = Tenant(firmware, b"secret", "alice")
    handle = alice.step(CREATE, 0).data[0].tolist()[0]
    assert alice.step(KvRead((handle,), 0), 0).status is Status.SUCCESS
    firmware.ftl.free([next(iter(firmware.ftl.sequences))], 0)
    done = alice.step(KvFree((handle,)), 0)
    assert (done.status, f"no sequence {handle:#x} of this tenant" in done.reason) == (Status.UNKNOWN_SEQUENCE, True)
