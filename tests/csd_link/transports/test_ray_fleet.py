"""Drives of a fleet, from a table that needs no Ray: each drive is served by a process of this test."""

import json

import numpy as np
import pytest

from csd_link.driveset import DriveSetConfig
from csd_link.fleet_table import FleetTable
from csd_link.host_end import DriveLostError
from csd_link.nvmeof.listen import AllowedHost, Listen, nqn_of
from csd_link.run_dir import port_path
from csd_link.transports import ray_fleet, transport_of
from csd_link.transports.ray_fleet import RayFleet
from tests.csd_link.test_fleet_table import member
from tests.served import decoder, serving
from tests.vcsd_cli.test_main import PROMPT, vcsd
from vcsd.transport import fleet_or_count, open_drives

HOST = "nqn.2014-08.org.nvmexpress:uuid:of-the-fleet"

pytestmark = pytest.mark.usefixtures("own_run_dir")


@pytest.fixture
def table(monkeypatch):
    """Puts a table in place; returns how often it was read."""
    reads = []

    def put(*members):
        table = FleetTable("f", HOST, members) if members else None
        monkeypatch.setattr(ray_fleet, "read_table", lambda cluster: reads.append(cluster) or table)
        transport_of(DriveSetConfig(transport="ray"))._kept.clear()
        return reads

    return put


def served(name, **fields):
    return member(name, host="127.0.0.1", port=int(port_path(name).read_text()), nqn=nqn_of(name), **fields)


@pytest.mark.parametrize("text", ["ray:x", "ray:10.0.0.1:6379", "ray://", "ray://10.0.0.1", "ray://a:b"])
def test_invalid_ray_address_is_refused(text):
    with pytest.raises(ValueError, match=r"Ray"):
        transport_of(DriveSetConfig(transport=text))


def test_fleet_decodes_equal_and_admits_only_its_host(tmp_path, table, capsys, monkeypatch):
    monkeypatch.setattr(ray_fleet, "KEPT_S", 600.0)
    with open_drives(DriveSetConfig(count=2)) as devices:
        _, _, step = decoder(devices)
        expected = [step() for _ in range(3)]
    listen = Listen("127.0.0.1", 0, ("drive0", "drive1", "spare0"), (AllowedHost(HOST),))
    with serving(tmp_path, *listen.drives, listen=listen):
        reads = table(*map(served, listen.drives))
        assert fleet_or_count("ray", "inproc") == (2, "ray") and fleet_or_count(3, "process") == (3, "process")
        results = []
        for drives in ("2", "ray"):
            words = ("run", "--prompt", PROMPT, "--max-new-tokens", "2", "--no-compare", "-o", "json")
            code, out, err = vcsd(capsys, monkeypatch, *words, "--drives", drives)
            assert code == 0, err
            results.append(json.loads(out) | {"wall_s": 0})
        assert results[0] == results[1]
        with open_drives(DriveSetConfig(count=2, transport="ray")) as devices:
            _, _, step = decoder(devices)
            np.testing.assert_array_equal([step() for _ in expected], expected)
        assert len(reads) == 2  # once for each count of the fleet's drives
        ray = transport_of(DriveSetConfig(transport="ray"))
        device = ray.more(DriveSetConfig(transport="ray"), ["drive0", "drive1"])()
        assert device.name == "spare0"
        assert ray.more(DriveSetConfig(transport="ray"), ["drive0", "drive1", "spare0"]) is None
        device.close()
        stranger = RayFleet()
        monkeypatch.setattr(stranger, "table", lambda *_, **__: FleetTable("f", "nqn.other", (served("drive0"),)))
        with pytest.raises(DriveLostError):
            stranger.served(DriveSetConfig(transport="ray"))[0]()


def test_fleet_with_too_few_drives_names_missing_ones(table):
    table(member("drive0"), member("drive1", state="lost", reason="its node is gone"), member("spare0"))
    with pytest.raises(DriveLostError, match="1 drives of the fleet are up and 2 are asked for: drive1 is lost"):
        transport_of(DriveSetConfig(transport="ray")).served(DriveSetConfig(count=2, transport="ray"))
    table(member("drive0", state="starting"))
    with pytest.raises(DriveLostError, match="no drive of the fleet is up: vcsd fleet status"):
        fleet_or_count("ray", "inproc")
    table()
    with pytest.raises(DriveLostError, match="no fleet is up: vcsd fleet up starts one"):
        fleet_or_count("ray", "inproc")
    with pytest.raises(ValueError, match="must be a number, ray or ray://HOST:PORT"):
        fleet_or_count("process", "inproc")


def test_spares_option_with_fleet_is_refused(table):
    table(member("drive0"), member("spare0"))
    with pytest.raises(ValueError, match="spares = 1: a fleet has its own, vcsd fleet up --spares 1"):
        RayFleet().served(DriveSetConfig(count=1, transport="ray", spares=1))


def test_draining_drives_are_named_by_generation(table):
    ray, drives = RayFleet(), DriveSetConfig(transport="ray")
    table(member("drive0", nqn="nqn.x:drive0.1"), member("drive1", nqn="nqn.x:drive1.1", state="draining"))
    assert ray.draining(drives) == ["drive1.1"]
    table()
    assert ray.draining(drives) == ()


def test_unreachable_fleet_drive_error_gives_state(table):
    ray = RayFleet()
    table(member("drive0", host="127.0.0.1", port=1))
    gone = {"host": "127.0.0.1", "port": 1}
    for now, says in (
        (member("drive0", **gone), "no drive answers over NVMe/TCP"),
        (member("drive0", generation=2, nqn="nqn.new", **gone), r"is lost with its node: .*\(generation 2\)"),
        (member("drive0", state="lost", reason="its node is gone", **gone), "drive drive0 is lost: its node is gone"),
        (member("drive1", **gone), "drive drive0: no drive 'drive0'"),
    ):
        table(member("drive0", **gone))
        ray._kept.clear()
        (connect,) = ray.served(DriveSetConfig(transport="ray"))
        table(now)
        with pytest.raises(DriveLostError, match=says):
            connect()
