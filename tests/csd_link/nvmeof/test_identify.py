"""Identify and log pages byte by byte, as the figures of the NVMe specifications place their fields.

partner of: csd_link/nvmeof/nvm.py, csd_link/nvmeof/subsystem.py
"""

from itertools import pairwise

import pytest

from csd_link.nvmeof import identify
from csd_link.nvmeof.commands import DISCOVERY_NQN
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.nvm import NvmNamespace
from csd_link.nvmeof.subsystem import ERROR_ENTRIES, Address, Smart
from tests.nvmeof import HOST, NQN, MemoryBlocks, subsystem_of

UUID = bytes(range(1, 17))


def page_of(size, fields):
    """A page of zeros but for fields, which are bytes or a number and its width, by their offsets."""
    page = bytearray(size)
    parts = {
        at: value if isinstance(value, bytes) else value[0].to_bytes(value[1], "little") for at, value in fields.items()
    }
    ends = sorted((at, at + len(part)) for at, part in parts.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends)), "fields overlap"
    for at, part in parts.items():
        page[at : at + len(part)] = part
    assert len(page) == size
    return bytes(page)


@pytest.mark.parametrize("is_discovery", [False, True])
def test_identify_controller(is_discovery):
    limits = Limits(transfer_bytes=1 << 20, queue_entries=300, in_capsule_bytes=8192)
    blocks = NvmNamespace(MemoryBlocks(), UUID)
    subsystem = subsystem_of(MemoryBlocks(), capacity_bytes=5 << 40, namespaces={1: blocks, 7: blocks})
    expected = {
        4: b"test".ljust(20),
        24: b"vcsd test".ljust(40),
        64: b"1".ljust(8),
        76: (2, 1),
        77: (8, 1),  # 4 KiB << 8
        78: (513, 2),
        80: (0x20000, 4),
        92: (0 if is_discovery else 1 << 8, 4),
        111: (2 if is_discovery else 1, 1),
        258: (3, 1),
        259: (3, 1),
        260: (0b11, 1),
        261: (0b100110, 1),
        262: (63, 1),
        266: (343, 2),
        268: (353, 2),
        280: (5 << 40, 16),
        320: (10, 2),
        512: (0x66, 1),
        513: (0x44, 1),
        514: (300, 2),
        516: (0 if is_discovery else 7, 4),
        520: (0b10001101, 2),
        525: (0b111, 1),
        536: (1 << 0 | 1 << 18 | 1 << 20, 4),
        768: (DISCOVERY_NQN if is_discovery else NQN).encode(),
        1792: (4 if is_discovery else (64 + 8192) // 16, 4),
        1796: (1, 4),
        1803: (1, 1),
    }
    assert identify.controller(subsystem, 513, is_discovery, limits) == page_of(4096, expected)


def test_names_are_cut_to_their_fields():
    long = subsystem_of(MemoryBlocks(), serial="s" * 30, model="m" * 50, firmware="f\u00e9" * 9, namespaces={})
    page = identify.controller(long, 1, True, Limits())
    assert page[4:72] == b"s" * 20 + b"m" * 40 + b"f?" * 4 and page[516:520] == bytes(4)
    assert identify.firmware_log(long) == page_of(512, {0: (1, 1), 8: b"f?" * 4})


@pytest.mark.parametrize(("page_bytes", "unit"), [(512, 0), (4096, 0), (8192, 1), (16384, 3)])
def test_identify_namespace_of_blocks(page_bytes, unit):
    blocks = MemoryBlocks()
    blocks.page_bytes = page_bytes
    size = blocks.size_bytes // 4096
    for used_bytes, used in ((0, 0), (1, 1), (4096, 1), (4097, 2), (blocks.size_bytes + 5000, size)):
        blocks.used_bytes = used_bytes
        expected = {
            0: (size, 8),
            8: (size, 8),
            16: (used, 8),
            24: (0b10001, 1),
            30: (1, 1),
            33: (0b1001, 1),
            64: unit.to_bytes(2, "little") * 5,
            104: UUID,
            130: (12, 1),
        }
        assert NvmNamespace(blocks, UUID).identify(HOST) == page_of(4096, expected)


def test_lists_and_descriptors_of_namespaces():
    namespace = NvmNamespace(MemoryBlocks(), UUID)
    namespace.csi = 0x30
    assert identify.descriptors(namespace) == page_of(
        4096, {0: (3, 1), 1: (16, 1), 4: UUID, 20: (4, 1), 21: (1, 1), 24: (0x30, 1)}
    )
    assert identify.independent(namespace) == page_of(4096, {1: (1, 1), 14: (1, 1)})
    assert identify.namespace_list([1, 300]) == page_of(4096, {0: (1, 4), 4: (300, 4)})
    most = identify.namespace_list(range(1, 2000))
    assert len(most) == 4096 and most[-4:] == (1024).to_bytes(4, "little")
    assert identify.command_sets([0, 0x30, 0]) == page_of(4096, {0: (1 | 1 << 0x30, 8)})


def test_health_log():
    smart = Smart(*range(1, 13))
    subsystem = subsystem_of(MemoryBlocks(), smart=lambda: smart)
    for number in range(3):
        subsystem.note(number, 0, 0, 0)
    counts = {32: 5, 48: 6, 64: 7, 80: 8, 96: 9, 112: 10, 144: 11, 160: 12, 176: 3}
    expected = {0: (1, 1), 1: (298, 2), 3: (2, 1), 4: (3, 1), 5: (4, 1)} | {at: (n, 16) for at, n in counts.items()}
    assert identify.smart_log(subsystem) == page_of(512, expected)
    for percent, shown in ((254, 254), (255, 255), (300, 255)):
        smart = Smart(percent_used=percent)
        assert identify.smart_log(subsystem)[5] == shown


def test_error_log_has_the_newest_first():
    subsystem = subsystem_of(MemoryBlocks())
    assert identify.error_log(subsystem) == bytes(64 * ERROR_ENTRIES)
    for number in range(1, ERROR_ENTRIES + 3):
        subsystem.note(number, number + 1, 0x4002, number + 2)
    assert subsystem.error_count == ERROR_ENTRIES + 2
    entries = [
        page_of(64, {0: (n, 8), 8: (n, 2), 10: (n + 1, 2), 12: (0x8004, 2), 14: (0xFFFF, 2), 24: (n + 2, 4)})
        for n in range(ERROR_ENTRIES + 2, 2, -1)
    ]
    assert identify.error_log(subsystem) == b"".join(entries)


def test_logs_of_what_is_supported():
    assert identify.features_log([1, 0x81]) == page_of(4096, {4: (1, 4), 4 * 0x81: (1, 4)})
    assert identify.supported_logs([0, 0x70]) == page_of(1024, {0: (1, 4), 4 * 0x70: (1, 4)})
    for is_discovery in (False, True):
        admin = {2, 6, 9, 0x0A, 0x0C, 0x18} | (set() if is_discovery else {8})
        expected = {4 * opcode: (1, 4) for opcode in admin} | {1024: (1, 4), 1028: (3, 4)}
        assert identify.effects_log({0: 1, 1: 3}, is_discovery) == page_of(4096, expected)


@pytest.mark.parametrize("is_ipv6", [False, True])
@pytest.mark.parametrize("needs_tls", [False, True])
def test_discovery_log(is_ipv6, needs_tls):
    subsystem = subsystem_of(MemoryBlocks(), needs_tls=needs_tls)
    page = identify.discovery_log(subsystem, Address("10.0.0.7", 4420, is_ipv6))
    assert page[:1024] == page_of(1024, {0: (1, 8), 8: (2, 8)})
    for number, (nqn, port) in enumerate(((NQN, b"4420"), (f"{NQN}2", b"4421")), 1):
        expected = {
            0: (3, 1),
            1: (2 if is_ipv6 else 1, 1),
            2: (2, 1),
            3: (0b101 if needs_tls else 0b110, 1),
            4: (number, 2),
            6: (0xFFFF, 2),
            8: (32, 2),
            32: port.ljust(32),
            256: nqn.encode(),
            512: b"10.0.0.7".ljust(256),
            768: (2 if needs_tls else 0, 1),
        }
        assert page[1024 * number : 1024 * (number + 1)] == page_of(1024, expected)
    assert len(page) == 3 * 1024
    assert identify.discovery_log(subsystem_of(MemoryBlocks(), discovers=()), Address("", 0, False)) == page_of(
        1024, {0: (1, 8)}
    )
