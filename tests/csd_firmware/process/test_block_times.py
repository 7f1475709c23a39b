"""Simulated times of sustained block writes through the mount and through NVMe/TCP: the flash limits them."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from csd_link.nvmeof.commands import Sqe
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.listen import AllowedHost, Listen, nqn_of
from csd_link.run_dir import port_path
from csd_spec import LogPage
from nvmevirt_config.describe import load_drive
from tests.served import serving, until
from vcsd.administer import admin_window, read_log

pytestmark = pytest.mark.usefixtures("own_run_dir")
HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001"
LARGE, PASSES = 32, 4  # pages of a write that fills the namespace; passes of random overwrites over it


@contextlib.contextmanager
def mounted(folder, spec):
    mount = folder / "mount"
    with serving(folder, "csd0", spec=spec, mount=mount):
        until((mount / "namespace").exists)
        file = os.open(mount / "namespace", os.O_RDWR)
        try:
            yield lambda page, data: os.pwrite(file, data, page * 4096)
            latency = json.loads((mount / "latency.json").read_text())["write"]
            assert latency["p99_ns"] >= 3_000_000
        finally:
            os.close(file)


@contextlib.contextmanager
def connected(folder, spec):
    with serving(folder, "csd0", spec=spec, listen=Listen("127.0.0.1", 0, ("csd0",), (AllowedHost(HOST),))):
        host = NvmeHost("127.0.0.1", int(port_path("csd0").read_text()), nqn_of("csd0"), HOST)
        with contextlib.closing(host):
            yield lambda page, data: host.io.command(Sqe(0x01, nsid=1, cdw10=page, cdw12=len(data) // 4096 - 1), [data])


def check_overwrites(front, folder):
    """MB/s is the program bandwidth of the flash over the write amplification, within 5 % (erases, reads of moves)."""
    spec = load_drive(Path(__file__).with_name("eight-lanes.yaml"))
    pages, generator = spec.geometry.pages // 4, np.random.default_rng(0)
    lanes = spec.geometry.lanes

    def logs():
        with contextlib.closing(admin_window("csd0")) as device:
            wear, latency = (read_log(device, page) for page in (LogPage.WEAR, LogPage.LATENCY))
        writes = latency["BlockWrite"]
        programs = [wear[f"pages_{kind}"] for kind in ("blocks", "journal", "moved", "groups")]
        return programs[0], sum(programs), writes["commands"] * writes["mean_ns"], writes["p99_ns"]

    with front(folder, spec) as write:
        for page in range(0, pages, LARGE):
            write(page, generator.bytes(LARGE * 4096))
        data, programs, busy_ns, _ = logs()
        content = generator.bytes(4096)
        for page in generator.integers(0, pages, PASSES * pages).tolist():
            write(page, content)
        data, programs, busy_ns, p99_ns = (
            now - old for now, old in zip(logs(), (data, programs, busy_ns, 0), strict=True)
        )
    written = PASSES * pages * 4096 / busy_ns
    bandwidth = lanes * 4096 / spec.timing.program_ns
    assert written == pytest.approx(bandwidth / (programs / data), rel=0.05)
    assert p99_ns >= 3_000_000


@pytest.mark.usefixtures("fuse")
def test_overwrites_of_mount_take_the_time_of_their_programs(tmp_path):
    check_overwrites(mounted, tmp_path)


def test_overwrites_over_nvme_tcp_take_the_time_of_their_programs(tmp_path):
    check_overwrites(connected, tmp_path)
