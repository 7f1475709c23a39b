"""Simulated time of commands that cross a network.

partner of: csd_spec/network.py
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_firmware import InProcessDrive
from csd_link.network import COMMAND_BYTES, COMPLETION_BYTES, NetworkDrive, Port
from csd_spec import Attend, Flush, KvAppend, SeqCreate, Status
from csd_spec.network import NETWORKS, Network, network_named
from tests.failing_device import FailingDevice

SLOW = Network(name="slow", bytes_per_s=1_000_000_000, message_ns=1000)  # a byte takes 1 ns


def test_port_rates_are_below_line_rate():
    for name, network in NETWORKS.items():
        gbits = int(name.split("gbe")[0])
        assert 0.94 < network.bytes_per_s / (gbits * 1e9 / 8) < 0.99
        assert network_named(name) is network
    with pytest.raises(ValueError, match=r"network = '1gbe': must be one of 25gbe, 25gbe-rdma"):
        network_named("1gbe")


def test_directions_of_port_are_independent():
    port = Port(SLOW)
    assert port.send(500, 0) == 1500
    assert port.send(500, 100) == 2000
    assert port.receive(200, 0) == 1200


def test_future_message_leaves_port_free_before():
    port = Port(SLOW)
    assert port.send(100, 10_000) == 11_100
    assert port.send(100, 0) == 1100
    assert port.send(9_950, 0) == 10_100 + 9_950 + 1000  # the gap is too small


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000)), max_size=200))
def test_a_port_never_moves_two_messages_at_once(messages):
    port = Port(SLOW)
    spans = sorted((end - nbytes, end) for nbytes, at_ns in messages for end in [port.send(nbytes, at_ns) - 1000])
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_forgotten_transfers_still_occupy_port():
    port = Port(SLOW)
    assert max(port.send(1000, 0) for _ in range(200)) == 200 * 1000 + 1000


def test_a_completion_has_the_time_of_both_messages(small_drive):
    plain, far = InProcessDrive(small_drive), NetworkDrive(InProcessDrive(small_drive), Port(SLOW))
    row, one = np.ones((1, 2, 16), np.float16), np.array([1])
    done = []
    for device in (plain, far):
        seqs = tuple(device.submit(SeqCreate(1, 1, 2, 16, 64), 0).result().data[0].tolist())
        q = np.ones((1, 2, 2, 16), np.float16)
        command = Attend(seqs, 0, q, row, row, "dense", 4, one, one)
        done.append(device.submit(command, 10**9).result())
    near, distant = done
    assert distant.submit_ns == near.submit_ns == 10**9
    payload = 8 + 8 + 8 + 32 + q.nbytes + 2 * row.nbytes  # handle, k, l, name of the method
    reply = sum(array.nbytes for array in near.data)
    network_ns = COMMAND_BYTES + payload + COMPLETION_BYTES + reply + 2 * SLOW.message_ns
    assert distant.breakdown_ns["network"] == network_ns
    assert distant.latency_ns == near.latency_ns + network_ns == sum(distant.breakdown_ns.values())
    assert all(np.array_equal(own, theirs) for own, theirs in zip(near.data, distant.data, strict=True))
    for device in (plain, far):
        device.close()


def test_drives_share_the_port(small_drive):
    port = Port(SLOW)
    devices = [NetworkDrive(InProcessDrive(small_drive), port) for _ in range(2)]
    rows = np.ones((64, 2, 16), np.float16)
    ends = []
    for device in devices:
        seqs = tuple(device.submit(SeqCreate(1, 1, 2, 16, 64), 0).result().data[0].tolist())
        ends.append(device.submit(KvAppend(seqs, 0, np.array([64]), rows, rows), 10**9))
    first, second = (end.result().breakdown_ns["network"] for end in ends)
    assert second - first >= 2 * rows.nbytes
    for device in devices:
        device.close()


def test_lost_drive_status_passes_unchanged(small_drive):
    lost = FailingDevice(small_drive, "a", left=0)
    device = NetworkDrive(lost, Port(SLOW))
    assert device.submit(Flush(), 0).result().status is Status.PATH_LOST
    assert device.reconnect() is None
    device.close()
