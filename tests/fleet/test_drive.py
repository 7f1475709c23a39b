"""A drive of a fleet on its node, with servers that need no firmware."""

import os
import signal
import socket
from dataclasses import asdict, replace

import pytest

from csd_link.fleet_table import FleetPlan
from csd_link.liveness import is_running
from csd_link.run_dir import run_dir
from fleet import drive as module
from fleet.drive import Assignment, FleetDrive, listen_host, place, served_name
from tests.served import until

pytestmark = pytest.mark.usefixtures("own_run_dir")

SERVER = """
import json, os, socket, sys, time
from pathlib import Path
(drive,) = json.loads(open(sys.argv[1]).read())["drives"]
Path(drive["path"]).mkdir(parents=True, exist_ok=True)
pid = Path(os.environ["VCSD_RUN_DIR"], drive["name"], "pid")
pid.parent.mkdir(exist_ok=True)
pid.write_text(str(os.getpid()))
line = socket.create_server((drive["listen"]["host"], drive["listen"]["port"]))
pid.with_name("nvme-tcp-port").write_text(str(drive["listen"]["port"]))
time.sleep(600)
"""


def assignment(tmp_path, server=SERVER, **fields):
    plan = FleetPlan(drives=1)
    hosted = plan.overrides | {"threads": 1}
    values = {"fleet": "f00d", "name": "drive0", "host_nqn": "nqn.h", "spec": asdict(plan.spec), "flash": ""}
    return Assignment(**values | {"hosted": hosted, "server": ("-c", server)} | fields)


def test_drive_keeps_folder_on_same_node_only(tmp_path):
    given = assignment(tmp_path, flash=str(tmp_path / "flash"))
    first = place(given, None, "node-a", "127.0.0.1")
    assert (first.generation, first.node, first.state, first.is_spare) == (1, "node-a", "starting", False)
    assert first.port and first.nqn.endswith("drive0.1-f00d")
    assert place(given, first, "node-a", "127.0.0.1").generation == 2  # its flash is not there
    (given.flash_root / served_name(given, 1)).mkdir(parents=True)
    again = place(given, replace(first, state="up"), "node-a", "127.0.0.1")
    assert again == replace(first, restarts=1)
    other = place(given, first, "node-b", "127.0.0.1")
    assert (other.generation, other.node, other.restarts) == (2, "node-b", 0) and other.nqn != first.nqn
    assert place(assignment(tmp_path, name="spare0"), None, "node-a", "127.0.0.1").is_spare


def test_a_local_fleet_listens_on_loopback():
    assert listen_host("10.1.2.3", is_local=True) == listen_host("127.0.0.1", is_local=False) == "127.0.0.1"
    assert listen_host("10.1.2.3", is_local=False) == "10.1.2.3"


def test_a_server_that_ends_is_started_again_at_the_same_port(tmp_path):
    rows = []
    given = assignment(tmp_path, flash=str(tmp_path / "flash"))
    drive = FleetDrive(given, place(given, None, "node-a", "127.0.0.1"), rows.append)
    until(lambda: rows[-1].state == "up")
    first = rows[-1]
    assert is_running(first.pid) and first.since_s > 0
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: rows[-1].state == "up" and rows[-1].restarts == 1)
    assert rows[-1].pid != first.pid and rows[-1].endpoint == rows[0].endpoint
    socket.create_connection((rows[-1].host, rows[-1].port)).close()
    drive.stop()
    assert not is_running(rows[-1].pid)
    drive.remove_files()
    assert not list(run_dir().iterdir()) and not list((tmp_path / "flash").iterdir())


def test_drive_with_taken_port_listens_on_another(tmp_path):
    rows = []
    given = assignment(tmp_path)
    member = place(given, None, "node-a", "127.0.0.1")
    with socket.create_server((member.host, member.port)):
        drive = FleetDrive(given, member, rows.append)
        until(lambda: rows[-1].state == "up")
        assert rows[-1].port != member.port
        drive.stop()


def test_server_that_cannot_start_is_lost_with_its_log(tmp_path):
    rows = []
    given = assignment(tmp_path, server="import sys; sys.exit('vcsd: no room')")
    drive = FleetDrive(given, place(given, None, "node-a", "127.0.0.1"), rows.append)
    until(lambda: rows[-1].state == "lost")
    assert rows[-1].reason == "no room"
    drive.stop()


def test_a_drive_that_its_server_restarts_is_counted(tmp_path):
    rows = []
    restart = "time.sleep(1)\npid.write_text(str(os.getppid()))\ntime.sleep(600)"
    given = assignment(tmp_path, server=SERVER.replace("time.sleep(600)", restart))
    drive = FleetDrive(given, place(given, None, "node-a", "127.0.0.1"), rows.append)
    until(lambda: rows[-1].state == "up" and rows[-1].restarts == 1)
    drive.stop()


def test_a_server_of_an_actor_that_was_killed_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "OLD_SERVER_TIMEOUT_S", 0.5)
    rows, given = [], assignment(tmp_path)
    first = FleetDrive(given, place(given, None, "node-a", "127.0.0.1"), rows.append)
    until(lambda: rows[-1].state == "up")
    first.stop()
    first._pid_file.write_text(str(os.getpid()))  # one that does not end
    second = FleetDrive(given, place(given, rows[-1], "node-a", "127.0.0.1"), rows.append)
    until(lambda: rows[-1].state == "up" and rows[-1].restarts == 1)
    second.stop()
    assert rows[-1].generation == 1
