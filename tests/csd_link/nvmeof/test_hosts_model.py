"""Several hosts of a drive against their dictionaries, in any order of commands, cuts, silence, slow reading, resets
and restarts of the drive.

partner of: eval/verify/model_host.py, csd_link/nvmeof/connection.py, csd_link/nvmeof/controllers.py,
csd_link/nvmeof/sequences.py, csd_link/nvmeof/nvm.py, csd_link/nvmeof/key_value.py, csd_link/nvmeof/device.py
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from csd_firmware import Firmware
from csd_firmware.namespace import Namespace
from csd_firmware.process.fifo_lock import FifoLock
from csd_firmware.process.listen import subsystem_of
from csd_link.nvmeof.commands import Sqe
from csd_link.nvmeof.device import Endpoint
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.listen import Listen
from csd_link.nvmeof.nvm import LBA_BYTES, Nvm
from csd_link.nvmeof.pdu import Digests, PduType, pack
from csd_link.nvmeof.target import Target
from csd_link.served_drive import ServedDrive
from csd_link.window import WindowLayout
from csd_spec import Geometry
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Nand
from tests.properties import examples
from vcsd_eval.verify.model_host import BLOCKS, ModelHost

SPEC = replace(
    INSTCSD_ZYNQ7045_8CH,
    name="model",
    geometry=Geometry(
        channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=256, pages_per_block=16, page_bytes=4096
    ),
    dram_bytes=1 << 24,
)
HOSTS = 3
LIMITS = Limits(in_capsule_bytes=8192, transfer_bytes=1 << 20, in_flight_bytes=1 << 21, host_in_flight_bytes=1 << 20)
HOSTILE = "nqn.2026-11.dev.vcsd:hostile"


class Drive:
    """A drive that listens, and can lose its power."""

    def __init__(self) -> None:
        self.nand, self.secret = Nand(SPEC.geometry), bytes(range(32))
        self.start()

    def start(self) -> None:
        """Power on, on any port."""
        self.firmware, turns = Firmware(SPEC, self.nand), FifoLock()
        served = ServedDrive(
            name="model",
            spec=SPEC,
            layout=WindowLayout(depth=4, slot_blocks=64),
            listen=Listen("127.0.0.1", 0, ("model",)),
        )
        namespace = Namespace(self.firmware, turns)
        self.subsystem = subsystem_of(served, self.firmware, namespace, turns, self.secret)
        self.target = Target(self.subsystem, "127.0.0.1", 0, LIMITS)
        self.target.start()

    def place(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.target.port, self.subsystem.nqn)

    def lose_power(self) -> None:
        self.target.stop()
        assert not self.firmware.failure
        self.nand.power_on()
        self.start()


class Hosts(RuleBasedStateMachine):
    """Any order of what hosts do. Honest ones never see another content, another status or a lost connection."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.drive, draw = Drive(), random.Random(seed)
        self.hosts = [ModelHost(self.drive.place, number, random.Random(draw.random())) for number in range(HOSTS)]
        self.hostile: list[NvmeHost] = []

    @rule(number=st.integers(0, HOSTS - 1), times=st.integers(1, 8))
    def honest_host_works(self, number: int, times: int) -> None:
        for _ in range(times):
            self.hosts[number].act()

    @rule(number=st.integers(0, HOSTS - 1))
    def honest_host_flushes(self, number: int) -> None:
        self.hosts[number].flush()

    @rule(number=st.integers(0, HOSTS - 1))
    def honest_host_leaves_and_comes(self, number: int) -> None:
        self.hosts[number].connect()
        self.hosts[number].check()

    @rule(number=st.integers(0, HOSTS - 1))
    def connection_is_cut(self, number: int) -> None:
        host = self.hosts[number]
        host._host.io.shut()
        host.act()  # it may notice now, or not until it uses the connection
        if host.counts.lost == 1:
            host.counts.lost, host.counts.first = 0, ""
        host.cut()

    @rule(opcode=st.sampled_from([Nvm.WRITE, Nvm.READ]), blocks=st.sampled_from([64, 256]), count=st.integers(1, 6))
    def hostile_host_is_silent_or_slow(self, opcode: int, blocks: int, count: int) -> None:
        """Announces data that never comes, or asks for data that it never reads."""
        with suppress(OSError, StatusError):
            host = NvmeHost("127.0.0.1", self.drive.target.port, self.drive.subsystem.nqn, HOSTILE)
            self.hostile.append(host)
            line, size = host.io.detach(), blocks * LBA_BYTES
            line.settimeout(0.2)
            sqe = Sqe(opcode, nsid=1, cdw10=HOSTS * BLOCKS, cdw12=blocks - 1, sgl_type=0x5A, sgl_bytes=size)
            for cid in range(count):
                line.sendall(b"".join(pack(PduType.CAPSULE_CMD, sqe._replace(cid=cid).pack(), (), Digests())))

    @precondition(lambda self: self.hostile)
    @rule()
    def hostile_host_goes(self) -> None:
        self.hostile.pop(0).close()

    @rule()
    def hostile_host_resets_its_controller(self) -> None:
        with suppress(OSError, StatusError):
            host = NvmeHost("127.0.0.1", self.drive.target.port, self.drive.subsystem.nqn, HOSTILE)
            host.set_property(0x14, 0)
            host.close()

    @rule()
    def drive_loses_power(self) -> None:
        self.drive.lose_power()
        for host in self.hosts:
            host.restarted()

    @invariant()
    def honest_hosts_are_served(self) -> None:
        for counts in (host.counts for host in self.hosts):
            assert (counts.lost, counts.wrong, counts.refused) == (0, 0, 0), counts.first
        assert not self.drive.firmware.failure

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        try:
            for host in self.hosts:
                host.check()
            self.honest_hosts_are_served()
        finally:
            for host in self.hostile:
                host.close()
            for host in self.hosts:
                host.close()
            self.drive.target.stop()


TestHosts = Hosts.TestCase
TestHosts.settings = settings(  # without shrinking, which would take minutes
    max_examples=examples(12), stateful_step_count=25, deadline=None, phases=[Phase.reuse, Phase.generate]
)


@pytest.fixture
def pair():
    drive = Drive()
    host = ModelHost(drive.place, 0, random.Random(0))
    yield drive, host
    host.close()
    drive.target.stop()


def test_model_detects_what_another_host_has_changed(pair):
    _, host = pair
    for _ in range(30):
        host.act()
    host.check()
    assert host.counts.wrong == 0
    host._host.io.command(Sqe(Nvm.WRITE, nsid=1, cdw10=3), [b"\1" * LBA_BYTES])
    host.check()
    assert (host.counts.wrong, host.counts.first) == (1, "wrong: block 3")


def test_model_detects_a_flush_that_is_forgotten(pair):
    drive, host = pair
    drive.firmware.ftl.flush = lambda start_ns: start_ns  # it lies
    host.store()
    host.flush()
    drive.lose_power()
    host.restarted()
    assert host.counts.wrong == 1
