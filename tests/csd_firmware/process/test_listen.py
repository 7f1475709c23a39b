"""A served drive and its NVMe/TCP hosts: blocks and values survive a restart; hosts of other tenants are isolated."""

import random
import struct
import uuid
from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_firmware.process.listen import uuid_of
from csd_firmware.values import Values
from csd_link.nvmeof.commands import Code, Sqe
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.host import NvmeHost, discover
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.listen import AllowedHost, Listen, nqn_of
from csd_link.run_dir import port_path
from csd_spec import GetLog, KvAppend, KvFree, KvList, KvName, LogPage, SeqCreate, SeqSweep, Status
from csd_spec.arrays import keys_of
from tests.nvmeof import KeyValueHost
from tests.served import kill, serving, until
from vcsd.administer import admin_window, read_log

pytestmark = pytest.mark.usefixtures("own_run_dir")
HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001"
STRANGER = HOST[:-1] + "2"
LISTEN = Listen("127.0.0.1", 0, ("csd0",), (AllowedHost(HOST),))


def host_of(name):
    return NvmeHost("127.0.0.1", int(port_path(name).read_text()), nqn_of(name), HOST)


def test_blocks_of_a_served_drive_outlive_its_process(tmp_path, small_drive):
    data = random.randbytes(65536)
    with serving(tmp_path, "csd0", flash=tmp_path, spec=small_drive, listen=LISTEN):
        first = host_of("csd0")
        uuid = bytes(first.identify(3, 1)[4:20])
        nsze = struct.unpack_from("<Q", first.identify(0, 1))[0]
        assert nsze * 4096 == small_drive.geometry.capacity_bytes // 4 == len(data)
        with pytest.raises(StatusError) as refused:
            first.io.command(Sqe(0x02, nsid=1, cdw10=nsze), (), 4096)
        assert refused.value.status == Code.LBA_RANGE
        half = data[:16384]
        first.io.command(Sqe(0x01, nsid=1, cdw10=0, cdw12=3), [half])
        first.io.command(Sqe(0x00, nsid=1))
        port_path("csd0").unlink()
        kill("csd0")
        until(port_path("csd0").exists)
        with pytest.raises(OSError):
            first.io.command(Sqe(0x02, nsid=1), (), 4096)
        first.close()
        again = host_of("csd0")
        assert again.io.command(Sqe(0x02, nsid=1, cdw12=3), (), 16384).data == half
        assert bytes(again.identify(3, 1)[4:20]) == uuid
        assert struct.unpack_from("<QQQ", again.identify(0, 1))[2] == 4
        again.io.command(Sqe(0x08, nsid=1, cdw12=1))
        assert again.io.command(Sqe(0x02, nsid=1, cdw12=3), (), 16384).data == bytes(8192) + half[8192:]
        assert again.log_page(2, 512)[112] >= 1, "power cycles"
        again.io.command(Sqe(0x01, nsid=1, cdw10=8), [data[:4096]])  # no Flush: the drive is stopped in good order
        again.close()
    device = InProcessDrive.reopen(tmp_path / "csd0")
    assert device.submit(GetLog(LogPage.SMART), 0).result().status == 0
    assert device.firmware.ftl.blocks.mapped * small_drive.geometry.page_bytes == 8192 + 4096
    device.close()


def status_of(action, *args, **more):
    with pytest.raises(StatusError) as refused:
        action(*args, **more)
    return refused.value.status


def test_values_outlive_a_kill(tmp_path, small_drive):
    large, small = random.randbytes(40_000), b"small"
    with serving(tmp_path, "csd0", flash=tmp_path, spec=small_drive, listen=LISTEN):
        host = KeyValueHost(host_of("csd0"))
        host.store(b"large", bytes(40_000))
        host.store(b"deleted", small)
        host.flush()
        host.store(b"large", large)
        host.store(b"a", small)
        host.store(b"a\0", b"")
        host.delete(b"deleted")
        host.flush()
        host.store(b"a", b"not flushed")
        port_path("csd0").unlink()
        kill("csd0")
        until(port_path("csd0").exists)
        host.host.close()
        again = KeyValueHost(host_of("csd0"))
        assert again.listed() == [b"a", b"a\0", b"large"]
        assert again.retrieve(b"large") == (large, len(large))
        assert again.retrieve(b"a")[0] in (small, b"not flushed"), "one of them as a whole"
        assert again.retrieve(b"a\0") == (b"", 0)
        again.store(b"a", small)
        again.host.io.command(Sqe(0x00, nsid=0xFFFFFFFF))  # a Flush of all namespaces
        kill("csd0")
        again.host.close()
    device = InProcessDrive.reopen(tmp_path / "csd0")
    assert Values(device.firmware).retrieve(b"a") == (small, len(small))
    device.close()


def test_hosts_that_are_not_listed_are_refused_and_counted(tmp_path, small_drive):
    with serving(tmp_path, "csd0", spec=small_drive, listen=LISTEN):
        port = int(port_path("csd0").read_text())
        for _ in range(2):
            assert status_of(NvmeHost, "127.0.0.1", port, nqn_of("csd0"), STRANGER) == Code.INVALID_HOST
        assert discover("127.0.0.1", port, HOST) == []
        assert status_of(discover, "127.0.0.1", port, STRANGER) == Code.INVALID_HOST
        device = admin_window("csd0")
        assert read_log(device, LogPage.SMART)["hosts_refused"] == 3
        assert STRANGER in read_log(device, LogPage.ERROR)["errors"][0]["reason"]
        device.close()


def test_hosts_of_different_tenants_share_nothing(tmp_path, small_drive):
    """Each has its keys, names, sequences and share of the drive."""
    listen = replace(LISTEN, hosts=(AllowedHost(HOST, "alice"), AllowedHost(STRANGER, "bob")))
    with serving(tmp_path, "csd0", spec=small_drive, listen=listen, tenants=("alice", "bob")):
        port = int(port_path("csd0").read_text())
        alice, bob = (KeyValueHost(NvmeHost("127.0.0.1", port, nqn_of("csd0"), name)) for name in (HOST, STRANGER))
        alice.store(b"key", b"alice's")
        bob.store(b"key", b"bob's")
        bob.store(b"more", b"")
        assert (alice.listed(), bob.listed()) == ([b"key"], [b"key", b"more"])
        assert alice.retrieve(b"key")[0] == b"alice's"
        assert status_of(alice.retrieve, b"more") == Code.UNKNOWN_KEY
        size, used = struct.unpack_from("<Q8xQ", alice.host.identify(5, 2, 1))
        assert 2 * used < size < small_drive.geometry.capacity_bytes // 2
        assert status_of(alice.store, b"other", bytes(size)) == Code.CAPACITY_EXCEEDED
        assert status_of(alice.store, b"key", bytes(size + 1)) == Code.INVALID_VALUE_SIZE
        bob.store(b"big", bytes(size // 2))
        assert alice.retrieve(b"key")[0] == b"alice's"
        devices = [NvmeDrive(lambda: Endpoint("127.0.0.1", port, nqn_of("csd0")), name) for name in (HOST, STRANGER)]
        handles = [int(done(device, SeqCreate(1, 1, 1, 8, 64))[0][0]) for device in devices]
        assert devices[1].submit(KvFree((handles[0],)), 0).result().status is Status.UNKNOWN_SEQUENCE
        assert done(devices[1], SeqSweep())[0].tolist() == [1], "its own, not what another is storing"
        rows = np.ones((4, 1, 8), np.float16)
        done(devices[0], KvAppend((handles[0],), 0, np.array([4]), rows, rows))
        done(devices[0], KvName((handles[0],), np.array([4]), keys_of([b"k" * 16])))
        for device, count in zip(devices, (1, 0), strict=True):
            listed = done(device, KvList(keys_of([bytes(16)]), 3))
            assert np.count_nonzero(listed[1]) == count
            device.close()
        assert (alice.listed(), bob.listed()) == ([b"key"], [b"big", b"key", b"more"])
        for tenant in (alice, bob):
            tenant.host.close()


def done(device, command):
    """Data of a command that succeeds."""
    completion = device.submit(command, 0).result()
    assert completion.status is Status.SUCCESS, completion.reason
    return completion.data


def test_identifiers_of_namespaces_are_uuids_of_the_drives_secret():
    """Of version 8; all other bits are drawn, and they stay the same."""
    drawn = [uuid_of(secret.to_bytes(4, "little"), nsid) for secret in range(300) for nsid in (1, 2)]
    assert len(set(drawn)) == len(drawn) and uuid_of(bytes(4), 1) == drawn[0]
    assert {uuid.UUID(bytes=identifier).version for identifier in drawn} == {8}
    assert {uuid.UUID(bytes=identifier).variant for identifier in drawn} == {uuid.RFC_4122}
    assert {identifier[6] & 0x0F for identifier in drawn} == {*range(16)} and {
        identifier[8] & 0x3F for identifier in drawn
    } == {*range(64)}
