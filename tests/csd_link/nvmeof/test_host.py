"""What a host reads of a discovery controller.

partner of: csd_link/nvmeof/host.py
"""

import struct

import pytest

from csd_link.nvmeof import host
from csd_link.nvmeof.host import DiscoveryRecord, discover

ENTRY = 1024


def entry(nqn, port):
    return b"\0" * 32 + port.ljust(32) + b"\0" * 192 + nqn.ljust(256, b"\0") + b"\0" * 512


class Discovery:
    """A discovery controller whose log says that it has `count` entries."""

    count, read, closed = 0, list[tuple[int, int]](), 0

    def __init__(self, *address, tls):
        assert address == ("10.0.0.1", 4420, host.DISCOVERY_NQN, "nqn.x:me")

    def log_page(self, page, size, offset=0):
        assert (page, size) == (0x70, ENTRY)
        Discovery.read.append(offset)
        if not offset:
            return struct.pack("<QQ", 7, self.count).ljust(ENTRY, b"\0")
        return entry(b"nqn.x:%d" % (offset // ENTRY), b"%d" % (4420 + offset // ENTRY) if offset > ENTRY else b"")

    def close(self):
        Discovery.closed += 1


@pytest.fixture
def controller(monkeypatch):
    monkeypatch.setattr(host, "NvmeHost", Discovery)
    Discovery.read, Discovery.closed = [], 0
    return Discovery


def test_subsystems_are_listed_with_their_ports(controller):
    controller.count = 2
    records = discover("10.0.0.1", 4420, "nqn.x:me")
    assert records == [DiscoveryRecord("nqn.x:1", 0), DiscoveryRecord("nqn.x:2", 4422)]
    assert (controller.read, controller.closed) == ([0, ENTRY, 2 * ENTRY], 1)


def test_a_count_without_end_is_not_believed(controller):
    controller.count = 1 << 63
    assert len(discover("10.0.0.1", 4420, "nqn.x:me")) == 4096
    assert controller.closed == 1
