"""Metrics of drives and of fleets, and the dashboard that shows them.

partner of: vcsd/drive_metrics.py
"""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from csd_firmware import Firmware
from csd_link.fleet_table import FleetTable
from csd_link.host_end import DriveLostError
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.listen import AllowedHost, Listen, nqn_of
from csd_link.run_dir import port_path
from csd_spec import Flush, GetLog, KvFree, LogPage, SeqCreate
from tests.csd_link.test_fleet_table import member
from tests.served import free_port, serving, until
from vcsd.drive_metrics import PAGES, DriveCollector, FleetCollector, parse_address, serve_metrics

BOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
COUNTERS = Path(__file__).parents[2] / "vcsd" / "counters.py"
HOST = "nqn.2014-08.org.nvmexpress:uuid:known"


def text_of(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def samples(text):
    """Values by name and labels after `drive`."""
    families = text_string_to_metric_families(text)
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "drive")): sample.value
        for family in families
        for sample in family.samples
    }


def logs_of(firmware):
    return {page: json.loads(bytes(firmware.step(GetLog(page), 0).data[0])) for page in PAGES}


def test_drive_metrics_equal_log_pages(small_drive):
    firmware = Firmware(small_drive)
    firmware.step(SeqCreate(1, 1, 2, 16, 512), 0)
    firmware.step(KvFree((99,)), 0)
    firmware.step(Flush(), 0)
    firmware.ftl.nand.erase_count[:3] = (1, 1, 4)
    logs = logs_of(firmware)
    result = samples(text_of(DriveCollector(["a", "b"], lambda drive: logs if drive == "a" else None)))
    assert result["vcsd_drive_refusals_total", "unknown_sequence"] == result["vcsd_drive_errors_total",] == 1
    assert result["vcsd_drive_flash_blocks_erased_total",] == 6
    assert result["vcsd_drive_flash_pages_programmed_total", "journal"] == logs[LogPage.WEAR]["pages_journal"] > 0
    assert result["vcsd_drive_commands_total", "Flush"] == 1
    assert result["vcsd_drive_power_ons_total",] == result["vcsd_drive_sequences",] == 1
    flush = logs[LogPage.LATENCY]["Flush"]
    assert result["vcsd_drive_simulated_seconds_total", "Flush"] == pytest.approx(flush["mean_ns"] / 1e9)
    assert 'vcsd_drive_answers{drive="b"} 0.0' in text_of(DriveCollector(["b"], lambda _: None))


@pytest.mark.usefixtures("own_run_dir")
def test_metrics_count_connections_and_refused_hosts(tmp_path, small_drive):
    port = free_port()
    listen = Listen("127.0.0.1", 0, ("csd0",), (AllowedHost(HOST),))
    with serving(tmp_path, "csd0", spec=small_drive, listen=listen):
        serve_metrics(f"127.0.0.1:{port}", DriveCollector(["csd0", "gone"]))

        def scrape():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                return answer.read().decode()

        at = "127.0.0.1", int(port_path("csd0").read_text()), nqn_of("csd0")
        with pytest.raises(Exception, match="status"):
            NvmeHost(*at, "nqn.stranger")
        host = NvmeHost(*at, HOST)
        text = scrape()
        assert 'vcsd_drive_answers{drive="csd0"} 1.0' in text and 'vcsd_drive_answers{drive="gone"} 0.0' in text
        assert 'vcsd_drive_hosts_refused_total{drive="csd0"} 1.0' in text
        assert 'vcsd_drive_refusals_total{drive="csd0",status="invalid_host"} 1.0' in text
        assert 'vcsd_drive_nvme_tcp_connections{drive="csd0"} 2.0' in text  # admin and I/O queue
        host.close()
        until(lambda: 'vcsd_drive_nvme_tcp_connections{drive="csd0"} 0.0' in scrape())
        with pytest.raises(OSError, match="Address already in use"):
            serve_metrics(f"127.0.0.1:{port}", DriveCollector([]))


def test_fleet_metrics_equal_fleet_table():
    rows = member("drive0", restarts=3), member("drive1", state="lost", generation=2), member("spare0")
    text = text_of(FleetCollector(lambda: FleetTable("f", "nqn.secret", rows)))
    assert 'vcsd_fleet_drives{state="up"} 2.0' in text and 'vcsd_fleet_drives{state="lost"} 1.0' in text
    assert 'vcsd_fleet_drive_restarts_total{drive="drive0"} 3.0' in text
    assert 'vcsd_fleet_drive_generation{drive="drive1"} 2.0' in text
    assert "secret" not in text


@pytest.mark.parametrize("error", [DriveLostError("no cluster"), ValueError("ray: no cluster on this machine")])
def test_unreadable_fleet_has_metric_answers_0(error):
    def fails():
        raise error

    assert "vcsd_fleet_answers 0.0" in text_of(FleetCollector(fails))


@pytest.mark.parametrize("text", ["9464", "127.0.0.1:", ":9464", "127.0.0.1:0", "127.0.0.1:70000", "a:b"])
def test_invalid_metrics_address_is_refused(text):
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        parse_address(text)


def test_every_query_of_the_board_names_a_metric_that_exists(small_drive):
    firmware = Firmware(small_drive)
    firmware.step(KvFree((99,)), 0)
    logs = logs_of(firmware)
    rows = (member("drive0"),)
    text = text_of(DriveCollector(["a"], lambda _: logs)) + text_of(FleetCollector(lambda: FleetTable("f", "n", rows)))
    known = {name for name, *_ in samples(text)}
    ours = re.findall(r'= (Counter|Gauge|Histogram)\("(\w+)"', COUNTERS.read_text())
    known |= {name + {"Counter": "_total", "Gauge": "", "Histogram": "_bucket"}[kind] for kind, name in ours}
    panels = json.loads(BOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) == len(panels) > 10
    for query in queries:
        names = set(re.findall(r"\bvcsd_\w+", query))
        assert names and names <= known, query


def test_taken_metrics_address_is_one_line_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "vcsd.drive_metrics", address, str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Address already in use" in done.stdout and done.stdout.count("\n") == 1
