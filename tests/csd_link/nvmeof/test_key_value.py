"""Key Value commands of two hosts: refusals, returned values and Identify data; the table in docs/nvme.md."""

import struct

import pytest

from csd_link.nvmeof.commands import Code, Sqe
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.key_value import KeyValue, KeyValueNamespace
from csd_link.nvmeof.nvm import NvmNamespace
from tests.nvmeof import (
    HOST,
    NQN,
    KeyValueHost,
    MemoryBlocks,
    MemoryValues,
    docs_table,
    subsystem_of,
    target_of,
)

OTHER = HOST[:-1] + "2"
UUID = bytes(range(16))


@pytest.fixture
def tenants():
    return {HOST: MemoryValues(), OTHER: MemoryValues()}


@pytest.fixture
def hosts(tenants):
    """Two hosts with values of their own."""
    namespaces = {1: NvmNamespace(MemoryBlocks(), UUID), 2: KeyValueNamespace(tenants.__getitem__, UUID)}
    with target_of(subsystem_of(MemoryBlocks(), namespaces=namespaces)) as target:
        made = [KeyValueHost(NvmeHost("127.0.0.1", target.port, NQN, name)) for name in tenants]
        yield made
        for host in made:
            host.host.close()


def refused(action, *args, **more):
    with pytest.raises(StatusError) as error:
        action(*args, **more)
    return error.value.status


def test_two_hosts_store_retrieve_list_and_delete(hosts, tenants):
    one, other = hosts
    large = bytes(range(256)) * 3000
    for key, value in ((b"a", b"1"), (b"a\0", b""), (b"k" * 16, large)):
        one.store(key, value)
    other.store(b"a", b"the other's")
    assert one.retrieve(b"a") == (b"1", 1)
    assert one.retrieve(b"a\0") == one.retrieve(b"a\0", 0) == (b"", 0)
    assert one.retrieve(b"k" * 16) == (large, len(large))
    assert one.retrieve(b"k" * 16, 1000) == (large[:1000], len(large)), "the size of the whole value"
    assert one.retrieve(b"k" * 16, 0) == (b"", len(large))
    assert (one.exist(b"a"), one.exist(b"k" * 16)) == (1, len(large))
    assert (one.listed(), other.listed()) == ([b"a", b"a\0", b"k" * 16], [b"a"])
    one.delete(b"a")
    assert (one.listed(), other.retrieve(b"a")) == ([b"a\0", b"k" * 16], (b"the other's", 11))
    one.flush()
    assert (tenants[HOST].flushes, tenants[OTHER].flushes) == (5, 1), "each Store and Delete, and Flush"


def test_missing_key_is_refused(hosts):
    one, _ = hosts
    for request in (one.retrieve, one.exist, one.delete):
        assert refused(request, b"key") == Code.UNKNOWN_KEY


@pytest.mark.parametrize(("option", "of_new", "of_known"), [(0, 0, 0), (1, 0x87, 0), (2, 0, 0x89), (3, 0x87, 0x89)])
@pytest.mark.parametrize("compression", [0, 4])
def test_store_options(hosts, option, of_new, of_known, compression):
    one, _ = hosts
    one.store(b"known", b"before")
    for key, before, status in ((b"known", [b"before"], of_known), (b"new", [], of_new)):
        if status:
            assert refused(one.store, key, b"after", option | compression) == status
        else:
            one.store(key, b"after", option | compression)
        values = [one.retrieve(key)[0]] if key in one.listed() else []
        assert values == (before if status else [b"after"])


def test_invalid_key_and_value_sizes_are_refused(hosts, tenants):
    one, _ = hosts
    for request in (one.retrieve, one.exist, one.delete, lambda key, **more: one.store(key, b"x", **more)):
        assert refused(request, b"key", length=0) == Code.INVALID_KEY_SIZE
        assert refused(request, b"key", length=17) == Code.INVALID_FIELD
    assert refused(one.listed, b"key", length=17) == Code.INVALID_FIELD
    one.store(b"largest", bytes(MemoryValues.max_value_bytes))
    assert refused(one.store, b"key", bytes(MemoryValues.max_value_bytes + 1)) == Code.INVALID_VALUE_SIZE
    assert one.listed() == [b"largest"]


def test_list_starts_at_key_and_fits_buffer(hosts):
    one, _ = hosts
    keys = [b"a", b"b", b"bb", b"bbb" * 5, b"c" * 16]
    for key in keys:
        one.store(key, b"")
    assert one.listed(b"") == keys
    assert one.listed(b"bb") == keys[2:], "from the key on"
    assert one.listed(b"b\1") == keys[2:], "from where it would be"
    assert one.listed(b"d") == []
    sizes = [4, 4, 4, 20, 20]
    for buffer in range(4, 60):
        fit = sum(4 + sum(sizes[: number + 1]) <= buffer for number in range(len(sizes)))
        assert one.listed(size=buffer) == keys[:fit]
    assert refused(one.listed, size=3) == Code.INVALID_FIELD


def test_identify(hosts, tenants):
    one, other = hosts
    one.store(b"key", bytes(5000))
    page = bytes(one.host.identify(5, 2, 1))
    assert struct.unpack_from("<QQQ", page) == (1 << 30, 0, 5000)
    assert (page[24:27], struct.unpack_from("<I", page, 32), page[48:64]) == (b"\x08\0\x01", (8192,), UUID)
    assert struct.unpack_from("<HBBIII", page, 72) == (16, 0, 0, 1 << 20, 100, 0)
    assert struct.unpack_from("<QQQ", other.host.identify(5, 2, 1)) == (1 << 30, 0, 0), "another tenant's"
    assert one.host.identify(6, csi=1) == bytes(4096)
    assert struct.unpack_from("<2I", one.host.identify(7, csi=1)) == (2, 0)
    assert struct.unpack_from("<3I", one.host.identify(2)) == (1, 2, 0)
    assert one.host.identify(8, 2)[14] == 1
    assert struct.unpack_from("<2Q", one.host.identify(0x1C)) == (0b11, 0)
    assert bytes(one.host.identify(3, 2)[20:25]) == b"\x04\x01\0\0\x01"
    assert refused(one.host.identify, 0, 2) == Code.INVALID_FIELD


def test_a_tenant_uses_no_more_than_its_size(hosts, tenants):
    """As a host requires of NUSE, also when the operator has made the tenant's share smaller than its values."""
    one, _ = hosts
    one.store(b"key", bytes(5000))
    tenants[HOST].size_bytes = 4000
    assert struct.unpack_from("<QQQ", one.host.identify(5, 2, 1)) == (4000, 0, 4000)


def test_docs_list_the_commands(hosts):
    one, _ = hosts
    effects = struct.unpack("<256I", one.host.log_page(5, 4096, csi=1)[1024:2048])
    table = docs_table("Key Value command set")
    assert {opcode for opcode, yes in table.items() if yes} == {number for number in range(256) if effects[number] & 1}
    for number, yes in table.items():
        if not yes:
            assert refused(one.host.io.command, Sqe(number, nsid=2)) == Code.INVALID_OPCODE
    assert {number for number in range(256) if effects[number] & 2} == {KeyValue.STORE, KeyValue.DELETE}
