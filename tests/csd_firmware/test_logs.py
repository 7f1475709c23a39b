"""Log pages: their counts, computed by hand."""

import json
import threading

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_firmware.namespace import Namespace
from csd_spec import Flush, GetLog, KvAppend, KvFree, LogPage, SeqCreate, Status


def read(firmware, page):
    return json.loads(bytes(firmware.step(GetLog(page), 0).data[0]))


def test_smart_log_counts_work(small_drive):
    firmware = Firmware(small_drive)
    fresh = read(firmware, LogPage.SMART)
    assert (fresh["power_cycles"], fresh["sequences"], fresh["waf"], fresh["avail_spare"]) == (1, 0, 1.0, 100)
    seqs = tuple(firmware.step(SeqCreate(1, 1, 2, 16, 512), 0).data[0].tolist())
    rows = np.ones((160, 2, 16), np.float16)
    done = firmware.step(KvAppend(seqs, 0, np.array([160]), rows, rows), 0)
    refused = firmware.step(KvFree((99,)), 0)
    smart = read(firmware, LogPage.SMART)
    assert (smart["host_write_commands"], smart["host_read_commands"], smart["num_err_log_entries"]) == (1, 0, 1)
    assert smart["sequences"] == 1
    assert smart["data_units_written"] == -(-2 * rows.nbytes // 512_000)
    (error,) = read(firmware, LogPage.ERROR)["errors"]
    assert error == {
        "command": "KvFree",
        "status_field": int(Status.UNKNOWN_SEQUENCE),
        "reason": refused.reason,
    }
    latency = read(firmware, LogPage.LATENCY)
    assert latency["KvAppend"] == {"commands": 1} | dict.fromkeys(("mean_ns", "p99_ns", "max_ns"), done.latency_ns)
    assert latency["GetLog"]["commands"] == 3


def test_wear_log_equals_nand_counters(small_drive):
    firmware = Firmware(small_drive)
    firmware.step(SeqCreate(1, 1, 2, 16, 512), 0)
    firmware.step(Flush(), 0)
    firmware.ftl.nand.erase_count[:3] = (1, 1, 4)
    firmware.ftl.nand._mark_bad(5)
    wear = read(firmware, LogPage.WEAR)
    blocks = small_drive.geometry.blocks
    assert wear["erase_histogram"] == {"0": blocks - 3, "1": 2, "4": 1}
    assert (wear["erase_min"], wear["erase_max"], wear["bad_blocks"]) == (0, 4, 1)
    assert wear["pages_journal"] > 0


def test_namespace_log_reports_size_before_first_use(small_drive):
    firmware = Firmware(small_drive)
    page = read(firmware, LogPage.NAMESPACE)
    pages = small_drive.geometry.pages // 4
    assert page == {"nsze": pages, "ncap": pages, "nuse": 0, "lba_bytes": small_drive.geometry.page_bytes}
    assert Namespace(firmware, threading.Lock()).size_bytes == pages * small_drive.geometry.page_bytes
    assert read(firmware, LogPage.NAMESPACE) == page


def test_health_counts_block_requests_too(small_drive):
    firmware = Firmware(small_drive)
    namespace = Namespace(firmware, threading.Lock())
    for at in range(20):
        namespace.write(at * 512, bytes(512))
    assert len(namespace.read(0, 5120)[0]) == 5120
    namespace.flush()
    assert firmware.ftl.counters.busy_ns == sum(latency.total_ns for latency in namespace.latency.values()) > 0
    smart = read(firmware, LogPage.SMART)
    assert (smart["host_write_commands"], smart["host_read_commands"]) == (20, 1)
    namespace.discard(0, 10240)
    for _ in range(200):
        namespace.read(0, 5120)  # deallocated blocks cross the link, too
    smart = read(firmware, LogPage.SMART)
    assert (smart["data_units_written"], smart["data_units_read"]) == (1, -(-201 * 5120 // 512_000))


def test_programs_are_described(small_drive):
    firmware = Firmware(small_drive, methods={"mine": lambda step: None})
    (mine,) = read(firmware, LogPage.PROGRAMS)["programs"]
    assert (mine["pind"], mine["name"], mine["does"], mine["rows"]) == (0, "mine", "", 0)
    programs = read(Firmware(small_drive), LogPage.PROGRAMS)["programs"]
    assert all(program["does"] for program in programs)


@pytest.mark.parametrize(("bad", "spare"), [(0, 100), (1, 96), (16, 50), (31, 3), (32, 0), (40, 0)])
def test_spare_is_what_is_left_of_half_the_blocks(small_drive, bad, spare):
    """Of 64 blocks; the warning is given when none is left."""
    firmware = Firmware(small_drive)
    assert small_drive.geometry.blocks == 64
    for block in range(bad):
        firmware.ftl.nand._mark_bad(block)
    smart = read(firmware, LogPage.SMART)
    assert smart["avail_spare"] == spare
    assert smart["critical_warning"] & 1 == (bad >= 32)
