"""The table of a fleet, without Ray."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from csd_link import fleet_kv, fleet_table
from csd_link.fleet_kv import dump
from csd_link.fleet_table import (
    ClusterAddress,
    FleetPlan,
    Member,
    find_cluster,
    local_file,
    mark_draining,
    missing_ray,
    parse_table,
    read_table,
)
from csd_link.host_end import DriveLostError
from csd_link.nvmeof.device import Endpoint
from tests.served import HANG_S

pytestmark = pytest.mark.usefixtures("own_run_dir")


def member(name, **fields):
    values = {"generation": 1, "state": "up", "node": "a", "host": "10.0.0.1", "port": 4000, "nqn": f"nqn.x:{name}.1"}
    return Member(name=name, is_spare=name.startswith("spare"), **values | fields)


def content(*members, nodes=("a",), names=None, **more):
    fleet = {"id": "f", "host_nqn": "nqn.h", "names": names or [entry.name for entry in members]}
    rows = {f"drive/{entry.name}": json.dumps(asdict(entry)) for entry in members}
    return {"keys": {"fleet": json.dumps(fleet)} | rows | more, "nodes": list(nodes)}


def test_plan_names_drives_then_spares():
    assert FleetPlan(drives=2, spares=1).names == ["drive0", "drive1", "spare0"]


def test_state_lost_with_node_draining_per_generation():
    rows = member("drive0"), member("drive1", node="b"), member("drive2", generation=2), member("spare0")
    drains = {"drain/drive0": "1", "drain/drive2": "1", "drain/drive1": "1"}
    table = parse_table(content(*rows, names=["drive0", "drive1", "drive2", "drive3", "spare0"], **drains))
    assert [entry.state for entry in table.members] == ["draining", "lost", "up", "starting", "up"]
    assert table.members[1].reason == "its node is gone"
    assert [entry.name for entry in table.usable(spares=False)] == ["drive2"]
    assert [entry.name for entry in table.usable(spares=True)] == ["spare0"]
    assert table.find("nqn.x:drive1.1").name == "drive1"
    assert table.find("drive0").endpoint == Endpoint("10.0.0.1", 4000, "nqn.x:drive0.1")
    with pytest.raises(ValueError, match=r"no drive 'x' in the fleet: there are drive0, drive1"):
        table.find("x")
    assert parse_table({"keys": {}, "nodes": ["a"]}) is None


def test_cluster_address_order_of_sources(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert find_cluster() == ClusterAddress("auto")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert find_cluster() == ClusterAddress("10.0.0.9:6379")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    local_file().write_text(json.dumps({"address": "10.0.0.2:1", "token": "secret", "pid": ended.pid}))
    with pytest.raises(DriveLostError, match="has exited, and its drives with it: vcsd fleet down"):
        find_cluster()
    assert find_cluster("//10.0.0.3:6379") == ClusterAddress("10.0.0.3:6379")
    local_file().write_text(json.dumps({"address": "10.0.0.2:1", "token": "secret", "pid": os.getpid()}))
    assert find_cluster() == ClusterAddress("10.0.0.2:1", "secret")
    assert find_cluster().environment["RAY_AUTH_TOKEN"] == "secret"


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "//:6379", "10.0.0.1:x", "http://a:1"])
def test_invalid_cluster_address_is_refused(address):
    with pytest.raises(ValueError, match="must be HOST:PORT of the cluster's GCS"):
        find_cluster(address)


def test_missing_ray_error_has_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert missing_ray().fix == "pip install 'vcsd[ray]'"
    with pytest.raises(ValueError, match=r"a fleet needs Ray: pip install 'vcsd\[ray\]'"):
        read_table(ClusterAddress("10.0.0.1:1"))


@pytest.fixture
def store(monkeypatch):
    """Replaces the process that talks to Ray with a command, and returns the arguments that it was given."""
    monkeypatch.setattr(fleet_table, "missing_ray", lambda: None)
    commands, real = [], subprocess.run

    def answer(script, timeout=HANG_S):
        def run(command, **options):
            commands.append(command[3:])
            return real([sys.executable, "-c", script], **options | {"timeout": timeout})

        monkeypatch.setattr(fleet_table.subprocess, "run", run)
        return commands

    return answer


def test_failing_or_silent_cluster_is_one_line_error(store):
    cluster = ClusterAddress("10.0.0.1:1")
    store("import sys; sys.exit('one\\nConnection refused')")
    with pytest.raises(DriveLostError, match=r"^no Ray cluster answers at 10.0.0.1:1: Connection refused$"):
        read_table(cluster)
    with pytest.raises(DriveLostError, match="no fleet is up on this machine: vcsd fleet up --local N"):
        read_table(ClusterAddress("auto"))
    store("import time; time.sleep(60)", timeout=0.2)
    with pytest.raises(DriveLostError, match="did not answer within"):
        read_table(cluster)


def test_table_is_read_and_drain_names_generation(store):
    commands = store(f"print({json.dumps(json.dumps(content(member('drive0'))))})")
    table = read_table(ClusterAddress("10.0.0.1:1"))
    assert (table.fleet, table.host_nqn, table.members) == ("f", "nqn.h", (member("drive0"),))
    mark_draining(ClusterAddress("10.0.0.1:1"), member("drive0", generation=3))
    assert commands == [["10.0.0.1:1"], ["10.0.0.1:1", "drain/drive0", "3"]]


def test_dump_of_table_lists_live_nodes():
    class Client:
        def internal_kv_keys(self, prefix, namespace):
            return [b"fleet", b"gone"]

        def internal_kv_get(self, key, namespace):
            return b"text" if key == b"fleet" else None

        def get_all_node_info(self):
            return {b"\x0a": type("Info", (), {"state": 0}), b"\x0b": type("Info", (), {"state": 1})}

    assert dump(Client()) == {"keys": {"fleet": "text"}, "nodes": ["0a"]}


def test_key_is_put_before_the_store_is_printed(monkeypatch, capsys):
    class Store(dict):
        def internal_kv_put(self, key, value, overwrite, namespace):
            assert overwrite and namespace == fleet_kv.NAMESPACE
            self[key.decode()] = value.decode()

    monkeypatch.setattr(fleet_kv, "_client", lambda address: Store(address=address))
    monkeypatch.setattr(fleet_kv, "dump", dict)
    monkeypatch.setattr("sys.argv", ["fleet_kv", "here:1", "drain/drive0", "yes"])
    fleet_kv.main()
    assert json.loads(capsys.readouterr().out) == {"address": "here:1", "drain/drive0": "yes"}
