"""A served drive and its NVMe/TCP hosts: blocks outlive a restart, and are those of the drive."""

import random
import struct

import pytest

from csd_firmware import InProcessDevice
from csd_link.nvmeof.commands import Code, Sqe
from csd_link.nvmeof.host import Host, discover
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.listen import Listen, nqn_of
from csd_link.run_dir import port_path
from csd_spec import GetLog, LogPage
from tests.served import kill, serving, until

pytestmark = pytest.mark.usefixtures("own_run_dir")
HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001"
LISTEN = Listen("127.0.0.1", 0, ("csd0",), (HOST,))


def host_of(name):
    return Host("127.0.0.1", int(port_path(name).read_text()), nqn_of(name), HOST)


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
    device = InProcessDevice.reopen(tmp_path / "csd0")
    assert device.submit(GetLog(LogPage.SMART), 0).result().status == 0
    assert device.firmware.ftl.blocks.mapped * small_drive.geometry.page_bytes == 8192 + 4096
    device.close()


def test_hosts_that_are_not_listed_are_refused(tmp_path, small_drive):
    with serving(tmp_path, "csd0", spec=small_drive, listen=LISTEN):
        port = int(port_path("csd0").read_text())
        with pytest.raises(StatusError) as refused:
            Host("127.0.0.1", port, nqn_of("csd0"))
        assert refused.value.status == Code.INVALID_HOST
        assert discover("127.0.0.1", port, HOST) == []
