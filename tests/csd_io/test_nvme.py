"""Identify data of a controller and a namespace. partner of: csd_link/nvme.py"""

import struct
from pathlib import Path

import pytest

from csd_io import nvme
from csd_io.nvme import READ, WRITE, NvmeTarget, max_transfer_bytes, parse_controller, parse_namespace
from csd_io.queue import IoRequest
from csd_link.nvme import PassthroughMedium


def test_identify_data_uses_nvme_cli_names():
    page = bytearray(4096)
    struct.pack_into(
        "<HH20s40s8s", page, 0, 0x1B36, 0x1AF4, b"serial".ljust(20), b"A Model".ljust(40, b"\0"), b"1.0".ljust(8)
    )
    page[77] = 7
    struct.pack_into("<HI", page, 78, 3, 0x10400)
    struct.pack_into("<I", page, 516, 256)
    assert parse_controller(bytes(page)) == {
        "vid": 0x1B36,
        "ssvid": 0x1AF4,
        "sn": "serial",
        "mn": "A Model",
        "fr": "1.0",
        "mdts": 7,
        "cntlid": 3,
        "ver": 0x10400,
        "nn": 256,
    }


def test_namespace_data_gives_lba_count_and_size():
    page = bytearray(4096)
    struct.pack_into("<Q", page, 0, 12345)
    page[26] = 0x12  # format 2, and a bit of metadata's
    page[128 + 4 * 2 + 2] = 12
    assert parse_namespace(bytes(page)) == (12345, 4096)


@pytest.mark.parametrize(("mdts", "lba", "limit"), [(6, 4096, 256 << 10), (9, 512, 2 << 20), (0, 512, 1 << 20)])
def test_transfer_size_follows_mdts(mdts, lba, limit):
    assert max_transfer_bytes(mdts, lba) == limit


def test_transfer_size_is_limited_by_16_bit_count():
    assert max_transfer_bytes(20, 512) == 512 << 16


@pytest.mark.parametrize(
    ("offset", "size", "ranges"),
    [
        (8192, 4096, [(1, 2)]),
        (0, 0, []),
        (4096, 0xFFFFFFFF << 12, [(0xFFFFFFFF, 1)]),
        (4096, (0xFFFFFFFF + 5) << 12, [(0xFFFFFFFF, 1), (5, 1 + 0xFFFFFFFF)]),
    ],
)
def test_ranges_are_discarded_in_commands_that_can_count_their_blocks(monkeypatch, offset, size, ranges):
    sent = list[tuple[int, int]]()

    def command(fd, opcode, nsid, page, nbytes, *words):
        attributes, blocks, first = struct.unpack_from("<IIQ", page)
        assert (fd, opcode, nsid, nbytes, words, attributes) == (9, 0x09, 7, 4096, (0, 1 << 2), 0)
        sent.append((blocks, first))

    monkeypatch.setattr(nvme, "io_command", command)
    target = NvmeTarget.__new__(NvmeTarget)
    target._fd, target._nsid, target.block_bytes = 9, 7, 4096
    target.discard(offset, size)
    assert sent == ranges


def test_device_without_namespace_is_refused():
    with pytest.raises(OSError):
        NvmeTarget(Path("/dev/zero"), None)


@pytest.mark.parametrize(("op", "opcode"), [("read", READ), ("write", WRITE)])
def test_a_request_is_a_command_with_its_first_block_and_count(op, opcode):
    target = NvmeTarget.__new__(NvmeTarget)
    target.block_bytes, target._nsid = 512, 3
    command = target._command(IoRequest(op, (5 << 32) + 4096 * 512, memoryview(bytearray(1536))))
    assert command[0] == opcode and struct.unpack_from("<I", command, 4) == (3,)
    assert struct.unpack_from("<I", command, 36) == (1536,)
    lba = (5 << 32) // 512 + 4096
    assert struct.unpack_from("<III", command, 40) == (lba & 0xFFFFFFFF, lba >> 32, 2)


def test_a_window_on_a_namespace_is_read_and_written_in_parts(monkeypatch, tmp_path):
    disk, parts = bytearray(64 * 512), list[tuple[int, int, int]]()

    def command(fd, opcode, nsid, buffer, size, low, high, count):
        at = (low | high << 32) * 512
        parts.append((opcode, at, (count + 1) * 512))
        if opcode == WRITE:
            disk[at : at + size] = buffer[:size]
        else:
            buffer[:size] = disk[at : at + size]

    monkeypatch.setattr("csd_link.nvme.identify_namespace", lambda fd: (3, 64, 512))
    monkeypatch.setattr("csd_link.nvme.io_command", command)
    (tmp_path / "ng0n1").touch()
    medium = PassthroughMedium(tmp_path / "ng0n1", offset_bytes=4096, max_bytes=4096)
    assert medium.blocks == 7
    data = bytes(range(256)) * 40  # two and a half blocks
    medium.write(1, data)
    assert parts == [(WRITE, at, 4096) for at in (8192, 12288, 16384)]
    assert bytes(medium.read(1, 3)) == data.ljust(3 * 4096, b"\0")
    medium.close()
    wide = PassthroughMedium(tmp_path / "ng0n1", offset_bytes=4096, max_bytes=8192)
    parts.clear()
    wide.write(1, data)
    assert parts == [(WRITE, 8192, 8192), (WRITE, 16384, 4096)]  # the last one is as long as what is left
    wide.close()
