"""Identify data, features, events and the NVM command set of a controller; the table in docs/nvme.md.

partner of: csd_link/nvmeof/controller.py, csd_link/nvmeof/controllers.py, csd_link/nvmeof/features.py,
csd_link/nvmeof/identify.py, csd_link/nvmeof/nvm.py, csd_link/nvmeof/subsystem.py
"""

import struct

import pytest

from csd_link.nvmeof.commands import Admin, Code, CommandError, Sqe
from csd_link.nvmeof.controller import Controller
from csd_link.nvmeof.features import Feature
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.subsystem import Smart
from tests.nvmeof import HOST, NQN, MemoryBlocks, docs_table, subsystem_of

WARNING_EVENTS = 0x1F


class Health:
    """The health of a drive, which tests change."""

    warning = 0

    def __call__(self):
        return Smart(critical_warning=self.warning, data_units_written=7, media_errors=1 << 70)


@pytest.fixture
def blocks():
    return MemoryBlocks()


@pytest.fixture
def health():
    return Health()


@pytest.fixture
def controller(blocks, health):
    made = Controller(subsystem_of(blocks, smart=health), 5, (bytes(16), HOST), Limits())
    made.set_property(0x14, 1)
    made.completed = []
    made.complete_event = lambda *what: made.completed.append(what)
    return made


def identify(controller, kind, nsid=0, csi=0):
    return controller.admin(Sqe(Admin.IDENTIFY, nsid=nsid, cdw10=kind, cdw11=csi << 24)).data[0]


def log(controller, page, size=4096, offset=0, csi=0):
    sqe = Sqe(Admin.GET_LOG_PAGE, cdw10=page | (size // 4 - 1) << 16, cdw12=offset, cdw14=csi << 24)
    return controller.admin(sqe).data[0]


def refused(action, *args, **more):
    with pytest.raises(CommandError) as error:
        action(*args, **more)
    return error.value.status


def test_controller_properties(controller):
    assert controller.get_property(0, True) == 127 | 1 << 16 | 20 << 24 | 1 << 37 | 1 << 43
    assert controller.get_property(8, False) == 0x20000
    assert (controller.get_property(0x14, False), controller.get_property(0x1C, False)) == (1, 1)
    controller.set_property(0x14, 1 | 1 << 14)
    assert controller.get_property(0x1C, False) == 1 | 2 << 2, "shut down"
    assert not controller.is_ready
    controller.set_property(0x14, 0)
    assert controller.get_property(0x1C, False) == 0
    for bad in ((0x14, 1 | 3 << 4), (0x1C, 0), (0x14, 1 << 32)):
        assert refused(controller.set_property, *bad) == Code.INVALID_FIELD
    assert refused(controller.get_property, 0x14, True) == Code.INVALID_FIELD
    assert refused(controller.get_property, 0x30, False) == Code.INVALID_FIELD


@pytest.mark.parametrize("selected", range(8))
@pytest.mark.parametrize("shutdown", range(4))
def test_controller_is_ready_while_enabled_and_not_shut_down(blocks, selected, shutdown):
    made = Controller(subsystem_of(blocks), 5, (bytes(16), HOST), Limits())
    assert refused(made.admin, Sqe(Admin.KEEP_ALIVE)) == Code.SEQUENCE_ERROR
    value = 1 | selected << 4 | shutdown << 14
    if selected not in (0, 6):
        assert refused(made.set_property, 0x14, value) == Code.INVALID_FIELD
        assert made.get_property(0x14, False) == 0
    else:
        made.set_property(0x14, value)
        assert made.get_property(0x14, False) == value
        assert made.get_property(0x1C, False) == (0b1001 if shutdown else 1)
        assert made.is_ready == (not shutdown)
    made.set_property(0x14, value & ~1)  # what a disabled controller selects does not matter
    assert (made.is_ready, made.get_property(0x1C, False)) == (False, 8 if shutdown else 0)


def test_event_requests_end_with_the_controller(controller, health):
    controller.admin(Sqe(Admin.SET_FEATURES, cdw10=Feature.ASYNC_EVENTS, cdw11=WARNING_EVENTS))
    controller.admin(Sqe(Admin.ASYNC_EVENT, cid=1))
    controller.set_property(0x14, 1 | 6 << 4)
    assert controller.admin(Sqe(Admin.ABORT, cdw10=1 << 16)).result == 0, "it is still enabled"
    controller.admin(Sqe(Admin.ASYNC_EVENT, cid=1))
    controller.set_property(0x14, 0)
    controller.set_property(0x14, 1)
    assert controller.admin(Sqe(Admin.ABORT, cdw10=1 << 16)).result == 1


def test_identify_controller_data(controller):
    page = identify(controller, 1)
    assert len(page) == 4096
    assert page[4:24] == b"test".ljust(20) and page[24:64] == b"vcsd test".ljust(40)
    assert struct.unpack_from("<HI", page, 78) == (5, 0x20000)
    assert 4096 << page[77] == Limits().transfer_bytes
    assert struct.unpack_from("<II", page, 1792) == ((64 + Limits().in_capsule_bytes) // 16, 1)
    assert page[768:].startswith(NQN.encode() + b"\0")
    assert struct.unpack_from("<I", page, 516) == (1,)


def test_identify_namespace_data(controller):
    page = identify(controller, 0, 1)
    lbas = MemoryBlocks.size_bytes // 4096
    assert struct.unpack_from("<QQQ", page) == (lbas, lbas, 3)
    assert (page[130], page[33] & 7, page[104:120]) == (12, 1, bytes(range(16)))
    assert struct.unpack_from("<H", page, 64) == (1,), "pages of 8 KiB"
    assert identify(controller, 5, 1) == page == identify(controller, 0, 0xFFFFFFFF)
    assert identify(controller, 8, 1)[14] == 1
    assert identify(controller, 6) == bytes(4096)
    assert identify(controller, 3, 1)[:25] == b"\x03\x10\0\0" + bytes(range(16)) + b"\x04\x01\0\0\0"
    for kind in (2, 7, 0x10, 0x1A):
        assert struct.unpack_from("<2I", identify(controller, kind)) == (1, 0)
        assert struct.unpack_from("<I", identify(controller, kind, 1)) == (0,)
    assert struct.unpack_from("<2Q", identify(controller, 0x1C)) == (1, 0)
    for kind, nsid, csi, status in (
        (0, 2, 0, Code.INVALID_NAMESPACE),
        (3, 2, 0, Code.INVALID_NAMESPACE),
        (5, 1, 1, Code.INVALID_FIELD),
        (6, 0, 1, Code.INVALID_FIELD),
        (7, 0, 1, Code.INVALID_FIELD),
        (0x42, 0, 0, Code.INVALID_FIELD),
    ):
        assert refused(identify, controller, kind, nsid, csi) == status


def test_log_pages_and_refusals(controller):
    smart = log(controller, 2, 512)
    assert int.from_bytes(smart[48:64], "little") == 7 and int.from_bytes(smart[160:176], "little") == 1 << 70
    assert log(controller, 2, 16, offset=48) == smart[48:64]
    controller.subsystem.note(1, 2, 0x4002, 3)
    controller.subsystem.note(4, 5, 0x4002, 6)
    assert int.from_bytes(log(controller, 2, 512)[176:192], "little") == 2  # as many as the error log has had
    newest = log(controller, 1, 64)
    assert struct.unpack_from("<QHHH", newest) == (2, 4, 5, 0x8004)
    assert log(controller, 3, 512)[:9] == b"\1" + bytes(7) + b"1"
    assert log(controller, 4) == bytes(4096)
    supported = struct.unpack("<256I", log(controller, 0x12, 1024))
    assert {number for number in range(256) if supported[number]} == set(Feature)
    assert log(controller, 0x13) == bytes(4096)
    assert log(controller, 2, 4, offset=512) == bytes(4), "the end of the page, and nothing after it"
    assert log(controller, 2, 1 << 20) == log(controller, 2, 512) + bytes((1 << 20) - 512)
    whole = (1 << 18) - 1
    for dwords in (whole + 1, 1 << 31):
        sqe = Sqe(Admin.GET_LOG_PAGE, cdw10=2 | (dwords & 0xFFFF) << 16, cdw11=dwords >> 16)
        assert refused(controller.admin, sqe) == Code.INVALID_FIELD
    assert refused(controller.admin, Sqe(Admin.GET_LOG_PAGE, cdw10=2, cdw13=1)) == Code.INVALID_FIELD
    assert refused(log, controller, 0x70) == Code.INVALID_LOG_PAGE
    assert refused(log, controller, 2, 512, offset=2) == Code.INVALID_FIELD
    assert refused(log, controller, 2, 512, offset=516) == Code.INVALID_FIELD
    assert refused(controller.admin, Sqe(Admin.GET_LOG_PAGE, cdw10=2, cdw11=0xFFFF)) == Code.INVALID_FIELD


def test_features(controller):
    def get(feature, select=0):
        return controller.admin(Sqe(Admin.GET_FEATURES, cdw10=feature | select << 8))

    def change(feature, value, save=0):
        return controller.admin(Sqe(Admin.SET_FEATURES, cdw10=feature | save << 31, cdw11=value))

    assert change(Feature.NUMBER_OF_QUEUES, 0x3F003F).result == 0x70007 == get(Feature.NUMBER_OF_QUEUES).result
    change(Feature.KEEP_ALIVE_TIMER, 5000)
    assert (get(Feature.KEEP_ALIVE_TIMER).result, controller.features.keep_alive_ms) == (5000, 5000)
    assert (get(Feature.KEEP_ALIVE_TIMER, 1).result, get(Feature.KEEP_ALIVE_TIMER, 3).result) == (0, 4)
    assert get(Feature.HOST_IDENTIFIER).data == (bytes(16),)
    assert get(Feature.VOLATILE_WRITE_CACHE).result == 1
    assert refused(change, Feature.VOLATILE_WRITE_CACHE, 0) == Code.NOT_CHANGEABLE
    assert get(Feature.KEY_VALUE_CONFIGURATION).result == 1, "a Delete of a key that does not exist fails"
    assert refused(change, Feature.KEY_VALUE_CONFIGURATION, 0) == Code.NOT_CHANGEABLE
    assert refused(change, Feature.HOST_IDENTIFIER, 0) == Code.NOT_CHANGEABLE
    assert refused(change, Feature.ASYNC_EVENTS, 0, 1) == Code.NOT_SAVEABLE
    for asked in (0xFFFF, 0xFFFF << 16):
        assert refused(change, Feature.NUMBER_OF_QUEUES, asked) == Code.INVALID_FIELD
    assert change(Feature.NUMBER_OF_QUEUES, 0xFFFEFFFE).result == 0x70007
    assert refused(get, 0x99) == refused(change, 0x99, 0) == refused(get, 1, 4) == Code.INVALID_FIELD


FIXED = {
    Feature.VOLATILE_WRITE_CACHE: 1,
    Feature.POWER_MANAGEMENT: 0,
    Feature.COMMAND_SET_PROFILE: 0,
    Feature.KEY_VALUE_CONFIGURATION: 1,
}


@pytest.mark.parametrize("feature", sorted(set(Feature) - {Feature.HOST_IDENTIFIER}))
def test_values_of_features(controller, feature):
    """Current, default and saved value, and whether it can be changed; it is the only one that changes."""

    def values(of):
        return [controller.features.get(Sqe(Admin.GET_FEATURES, cdw10=of | select << 8)).result for select in range(4)]

    before = {each: values(each) for each in Feature if each != Feature.HOST_IDENTIFIER}
    value = FIXED.get(feature, 7)
    controller.admin(Sqe(Admin.SET_FEATURES, cdw10=feature, cdw11=value))
    if feature in FIXED:
        expected = [value, value, value, 0]
        assert refused(controller.admin, Sqe(Admin.SET_FEATURES, cdw10=feature, cdw11=value + 1)) == Code.NOT_CHANGEABLE
    else:
        expected = [0x70007, 0x70007, 0x70007, 4] if feature == Feature.NUMBER_OF_QUEUES else [7, 0, 0, 4]
    assert {each: values(each) for each in before} == before | {feature: expected}


def test_keep_alive_renews_the_timeout(controller, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("csd_link.nvmeof.controller.time.monotonic", lambda: now)
    controller.features.keep_alive_ms = 1000
    for _ in range(5):
        controller.admin(Sqe(Admin.KEEP_ALIVE))
        now += 1.9
        assert not controller.expired
    controller.admin(Sqe(Admin.IDENTIFY, cdw10=1))  # other commands do not count
    now += 0.2
    assert controller.expired
    controller.admin(Sqe(Admin.KEEP_ALIVE))
    now += 2.0
    assert not controller.expired
    controller.features.keep_alive_ms = 0
    assert not controller.expired


def test_an_event_request_is_held_until_the_health_changes(controller, health):
    controller.admin(Sqe(Admin.SET_FEATURES, cdw10=Feature.ASYNC_EVENTS, cdw11=WARNING_EVENTS))
    assert controller.admin(Sqe(Admin.ASYNC_EVENT, cid=1)) is None
    assert controller.admin(Sqe(Admin.ASYNC_EVENT, cid=2)) is None
    assert controller.admin(Sqe(Admin.KEEP_ALIVE)).result == 0 and not controller.completed
    health.warning = 1 << 2
    controller.admin(Sqe(Admin.KEEP_ALIVE))
    controller.admin(Sqe(Admin.KEEP_ALIVE))
    assert controller.completed == [(1, 1 | 0x02 << 16, 0)], "once for each change"
    assert controller.admin(Sqe(Admin.ABORT, cdw10=2 << 16)).result == 0
    assert controller.completed[1:] == [(2, 0, Code.ABORTED)]
    assert controller.admin(Sqe(Admin.ABORT, cdw10=2 << 16)).result == 1, "nothing was aborted"
    for cid in range(4):
        controller.admin(Sqe(Admin.ASYNC_EVENT, cid=cid))
    assert refused(controller.admin, Sqe(Admin.ASYNC_EVENT, cid=9)) == Code.EVENT_LIMIT


@pytest.mark.parametrize("bit", range(6))
def test_a_warning_completes_an_event_request_if_the_host_has_enabled_it(controller, health, bit):
    controller.admin(Sqe(Admin.SET_FEATURES, cdw10=Feature.ASYNC_EVENTS, cdw11=0xFF & ~(1 << 3)))
    controller.admin(Sqe(Admin.ASYNC_EVENT, cid=9))
    health.warning = 1 << bit
    controller.admin(Sqe(Admin.KEEP_ALIVE))
    information = {0: 2, 1: 1}.get(bit, 0)  # spare, temperature; all others are about the reliability
    expected = [(9, 1 | information << 8 | 2 << 16, 0)] if bit not in (3, 5) else []
    assert controller.completed == expected


def test_discovery_controller_reports_no_health(health):
    made = Controller(subsystem_of(MemoryBlocks(), smart=health, namespaces={}), 5, (bytes(16), HOST), Limits())
    made.complete_event = lambda *what: pytest.fail("it has no drive")
    made.set_property(0x14, 1)
    made.admin(Sqe(Admin.SET_FEATURES, cdw10=Feature.ASYNC_EVENTS, cdw11=WARNING_EVENTS))
    assert made.admin(Sqe(Admin.ASYNC_EVENT, cid=1)) is None
    health.warning = 1 << 2
    made.admin(Sqe(Admin.KEEP_ALIVE))
    assert refused(made.admin, Sqe(Admin.ABORT, cdw10=1 << 16)) == Code.INVALID_OPCODE
    for kind in (0, 2, 3, 0x1C):
        assert refused(identify, made, kind) == Code.INVALID_FIELD
    assert len(identify(made, 1)) == 4096
    pages = struct.unpack("<256I", log(made, 0, 1024))
    assert {number for number in range(256) if pages[number]} == {0, 0x70}


def nvm(controller, opcode, lba=0, count=1, data=b"", **more):
    sqe = Sqe(opcode, nsid=1, **{"cdw10": lba & 0xFFFFFFFF, "cdw11": lba >> 32, "cdw12": count - 1} | more)
    namespace = controller.namespace(1)
    return namespace.execute(sqe, data[: namespace.data_bytes(sqe)], HOST)


def test_nvm_commands(controller, blocks):
    data = b"a" * 4096 + b"b" * 4096
    nvm(controller, 0x01, 3, 2, data)
    assert nvm(controller, 0x02, 4).data == (data[4096:],)
    assert blocks.flushes == 0
    nvm(controller, 0x05, 3, 2, data)
    assert refused(nvm, controller, 0x05, 3, 2, data[::-1]) == Code.COMPARE_FAILURE
    nvm(controller, 0x0C, 3, 2)
    nvm(controller, 0x00)
    nvm(controller, 0x01, 9, 1, data, cdw12=1 << 30)
    assert blocks.flushes == 2, "force unit access flushes"
    nvm(controller, 0x08, 3, 1)
    assert nvm(controller, 0x02, 3, 2).data == (bytes(4096) + data[4096:],)
    ranges = struct.pack("<IIQ", 0, 1, 4) + struct.pack("<IIQ", 0, 0, 1 << 60) + bytes(4064)
    nvm(controller, 0x09, data=ranges, cdw10=1, cdw11=0)
    assert nvm(controller, 0x02, 4).data == (data[4096:],), "without deallocation ranges are hints"
    nvm(controller, 0x09, data=ranges, cdw10=1, cdw11=4)
    assert nvm(controller, 0x02, 4).data == (bytes(4096),)


def test_ranges_beyond_the_end_change_nothing(controller, blocks):
    nvm(controller, 0x01, 7, 1, b"x" * 4096)
    last = MemoryBlocks.size_bytes // 4096
    for opcode in (0x01, 0x02, 0x05, 0x08, 0x0C):
        assert refused(nvm, controller, opcode, last - 1, 2, bytes(8192)) == Code.LBA_RANGE
        assert refused(nvm, controller, opcode, 2**64 - 1, 1, bytes(4096)) == Code.LBA_RANGE
    ranges = struct.pack("<IIQ", 0, 1, 7) + struct.pack("<IIQ", 0, 1, last)
    assert refused(nvm, controller, 0x09, data=ranges, cdw10=1, cdw11=4) == Code.LBA_RANGE
    assert blocks.read(7 * 4096, 4096) == b"x" * 4096, "all ranges or none"


def test_docs_table_equals_supported_commands(controller):
    effects = struct.unpack("<512I", log(controller, 5)[:2048])
    assert {opcode for opcode, yes in docs_table("Admin commands").items() if yes} == {
        number for number in range(256) if effects[number] & 1
    }
    assert {opcode for opcode, yes in docs_table("NVM command set").items() if yes} == {
        number for number in range(256) if effects[256 + number] & 1
    }
    for number, yes in docs_table("Admin commands").items():
        if not yes:
            assert refused(controller.admin, Sqe(number)) == Code.INVALID_OPCODE
    pages = struct.unpack("<256I", log(controller, 0, 1024))
    assert {opcode for opcode, yes in docs_table("Log pages").items() if yes} == {
        number for number in range(256) if pages[number] & 1
    } | {0x70}
    features = docs_table("Features")
    assert {opcode for opcode, yes in features.items() if yes} == set(Feature)
