"""Decodes over faulty connections lose nothing; lost and repeated commands are counted.

partner of: eval/verify/nvme_cuts.py, eval/verify/faulty_proxy.py
"""

import random
import socket

import pytest

from csd_link.nvmeof import host_queue
from csd_link.nvmeof.pdu import Digests
from csd_link.nvmeof.sequences import SequenceNamespace
from csd_spec import Attend, KvFree
from tests.csd_link.nvmeof.test_sequences import IDENTITY, Counting, device_of, target_with
from vcsd_eval.verify import nvme_cuts
from vcsd_eval.verify.faulty_proxy import FAULTS, FaultyProxy
from vcsd_eval.verify.nvme_cuts import bench_nvme_cuts


@pytest.mark.usefixtures("own_run_dir")
def test_a_decode_over_cut_connections_has_the_same_tokens(monkeypatch):
    # without "drop": a dropped message costs a timeout
    monkeypatch.setattr(nvme_cuts, "KINDS", ("cut", "double", "flip", "delay"))
    result = bench_nvme_cuts(cuts=2, drives=1, tokens=16, seed=1, tick=lambda _: None)
    assert [result[key] for key in ("lost", "wrong", "twice", "refusals_missed")] == [0] * 4, result
    assert result["cuts"] >= 2
    assert (result["refused_nqn"], result["refused_host"]) == (10, 10)


@pytest.mark.parametrize("kind", FAULTS)
def test_commands_are_executed_once_under_every_fault(kind, monkeypatch):
    monkeypatch.setattr(host_queue, "PDU_S", 0.3)
    service = Counting()
    with target_with(SequenceNamespace(lambda host: service, IDENTITY, bytes(16)), pdu_s=0.3) as target:
        proxy = FaultyProxy(target.port, random.Random(3), 400_000, (kind,))
        device = device_of(proxy.port, digests=Digests(True, True))
        proxy.is_active = True
        sizes = [10, 5000, 50_000, 0] * 20
        result = [device.submit(KvFree((size,)), number).result() for number, size in enumerate(sizes)]
        assert [done.data[0].size for done in result] == sizes
        assert service.seen == list(range(len(sizes)))
        assert proxy.faults[kind] == proxy.count > 0
        proxy.is_active = False
        device.close()
        proxy.close()


@pytest.mark.usefixtures("own_run_dir")
def test_commands_that_are_executed_twice_are_counted(monkeypatch):
    submit = nvme_cuts.NvmeDrive._submit

    def twice(self, command, submit_ns):
        if isinstance(command, Attend):
            submit(self, command, submit_ns).result()
        return submit(self, command, submit_ns)

    monkeypatch.setattr(nvme_cuts.NvmeDrive, "_submit", twice)
    monkeypatch.setattr(nvme_cuts, "MOST_BYTES", 1 << 18)
    monkeypatch.setattr(nvme_cuts, "KINDS", ("delay",))
    result = bench_nvme_cuts(cuts=1, drives=1, tokens=8, seed=1, tick=lambda _: None)
    assert result["twice"] > 0


def test_proxy_without_listener_closes_connections():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    proxy = FaultyProxy(port, random.Random(0), 10)
    with socket.create_connection(("127.0.0.1", proxy.port)) as line:
        assert line.recv(1) == b""
    proxy.close()
