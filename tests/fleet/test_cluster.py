"""A fleet on a Ray cluster of three nodes, and on this machine alone, through the command line.

partner of: fleet/cluster.py, fleet/local.py, vcsd_cli/fleet.py, csd_link/fleet_kv.py
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from csd_link.driveset import DriveSetConfig
from csd_link.fleet_table import find_cluster, local_file, read_table
from csd_link.liveness import is_running
from csd_link.run_dir import pid_path, run_dir
from csd_link.transports import transports
from csd_spec import DriveError
from tests.conftest import missing
from tests.served import decoder, until
from vcsd.loading import CHECKPOINT, load
from vcsd.session import attach
from vcsd.transport import open_drives

pytestmark = pytest.mark.slow

HOLDER = Path(__file__).with_name("hold_cluster.py")
PROMPT = "The keys and values of attention"


def vcsd(*words):
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def ray_here():
    """Ray and a run folder of these tests' own, for the whole module."""
    if find_spec("ray") is None:
        missing("ray", "Ray is not installed: ./dev setup")
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setenv("VCSD_RUN_DIR", f"{folder}/run")
        m.setenv("RAY_TMPDIR", folder)  # pytest's own paths are too long for Ray's sockets
        m.setenv("RAY_USAGE_STATS_ENABLED", "0")
        m.setenv("RAY_ADDRESS", "127.0.0.1:1")  # no test finds a cluster that is not its own
        m.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        Path(folder, "run").mkdir(mode=0o700)
        yield m


@pytest.fixture(scope="module")
def cluster(ray_here):
    """A cluster of three nodes: its head's identifier, its address, and a function that replaces a node."""
    with ray_here.context() as m:
        m.setenv("RAY_AUTH_MODE", "token")
        m.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        command = [sys.executable, str(HOLDER), "3"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            head, address = holder.stdout.readline().split()

            def remove(node):
                holder.stdin.write(f"{node}\n")
                holder.stdin.flush()
                assert holder.stdout.readline() == "replaced\n"

            yield head, address, remove
        finally:
            holder.communicate()


@pytest.fixture(scope="module")
def fleet(cluster, tmp_path_factory):
    """A fleet of two drives and a spare on that cluster."""
    _, address, _ = cluster
    flash = tmp_path_factory.mktemp("flash")
    file = flash / "FLEET.yaml"
    file.write_text(f"drives: 2\nspares: 1\nflash: {flash}/kept\naddress: {address}\n")
    done = vcsd("fleet", "up", str(file))
    assert done.returncode == 0, done.stderr
    yield address
    done = vcsd("fleet", "down", "--address", address)
    assert done.returncode == 0 and done.stderr.endswith("the fleet is down\n"), done.stderr
    assert not list(run_dir().iterdir()) and not list((flash / "kept").iterdir())
    assert "no fleet is up" in vcsd("fleet", "down", "--address", address).stderr


def parent_of(pid):
    """The process that has started another one: the actor, of a server."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def members(address):
    return {member.name: member for member in read_table(find_cluster(address)).members}


def test_drives_are_on_three_nodes_and_a_second_fleet_is_refused(fleet):
    result = members(fleet)
    assert {each.state for each in result.values()} == {"up"} and len({each.node for each in result.values()}) == 3
    rows = json.loads(vcsd("fleet", "status", "--address", fleet, "-o", "json").stdout)["drives"]
    assert [row["name"] for row in rows] == list(result) == ["drive0", "drive1", "spare0"]
    assert "drive1" in vcsd("fleet", "status", "--address", fleet).stdout
    again = vcsd("fleet", "up", "--local", "1", "--address", fleet)
    assert "exclude each other" in again.stderr
    file = run_dir().parent / "again.yaml"
    file.write_text(f"drives: 1\naddress: {fleet}\n")
    again = vcsd("fleet", "up", str(file))
    assert again.returncode == 1 and "a fleet is already up" in again.stderr.splitlines()[-1]
    assert members(fleet) == result


def test_a_run_has_the_tokens_and_figures_of_drives_in_process(fleet):
    results = []
    for drives in ("2", f"ray://{fleet}"):
        done = vcsd(
            "run", "--prompt", PROMPT, "--max-new-tokens", "4", "--no-compare", "--drives", drives, "-o", "json"
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout) | {"wall_s": 0})
    assert results[0] == results[1]


def test_decode_continues_after_drive_and_actor_kills(fleet):
    with open_drives(DriveSetConfig(count=2)) as devices:
        _, _, step = decoder(devices)
        expected = [step() for _ in range(9)]
    before = members(fleet)
    served = before["drive0"].nqn.rpartition(":")[2]
    kills = {2: int(pid_path(served).read_text()), 5: parent_of(before["drive1"].pid)}
    with open_drives(DriveSetConfig(count=2, transport=f"ray://{fleet}")) as devices:
        driver, batch, step = decoder(devices, flush_interval_steps=2)
        for number, output in enumerate(expected):
            if number in kills:
                os.kill(kills[number], signal.SIGKILL)
            np.testing.assert_array_equal(step(), output)
        driver.free(batch)
    until(lambda: [(member.restarts, member.state) for member in members(fleet).values()][:2] == [(1, "up")] * 2)
    after = members(fleet)
    assert [after[name].endpoint for name in after] == [before[name].endpoint for name in before]


@pytest.mark.parametrize("redundancy", ["mirror", pytest.param("recompute", marks=pytest.mark.long)])
def test_tokens_are_equal_after_loss_of_a_node(fleet, cluster, redundancy):
    head, _, replace_node = cluster
    model, tokenizer = load(CHECKPOINT)
    inputs = tokenizer(PROMPT, return_tensors="pt")

    def decode():
        return model.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=0).tolist()

    with torch.inference_mode(), attach(model, drives=2):
        expected = decode()
    until(lambda: all(member.state == "up" for member in members(fleet).values()))
    lost = next(member for member in members(fleet).values() if member.node != head and not member.is_spare)
    with torch.inference_mode(), attach(model, drives=f"ray://{fleet}", redundancy=redundancy) as csd:
        groups = csd.driver.devices
        assert decode() == expected
        replace_node(lost.node)
        until(lambda: decode() == expected and any(group.events for group in groups))
        assert all(group.wait_filled(60) for group in groups)
        assert decode() == expected
        kinds = [event.kind for group in groups for event in group.events]
        assert {"lost", "served", "redundant"} <= set(kinds)
    until(lambda: members(fleet)[lost.name].generation > lost.generation)  # Ray notices later than hosts do


def test_a_spare_is_reached_and_a_drained_drive_is_not(fleet):
    ray, drives = transports()["ray"], DriveSetConfig(count=2, transport=f"ray://{fleet}")
    used = [members(fleet)[name].nqn.rpartition(":")[2] for name in ("drive0", "drive1")]
    device = ray.more(drives, used)()
    assert device.name.startswith("spare0.1")
    assert ray.more(drives, [*used, device.name]) is None
    device.close()
    assert "no drive 'nope'" in vcsd("fleet", "drain", "nope", "--address", fleet).stderr
    assert vcsd("fleet", "drain", "spare0", "--address", fleet).stderr == "spare0: draining\n"
    assert members(fleet)["spare0"].state == "draining" and ray.more(drives, used) is None


def test_lost_node_one_error_and_new_drive(fleet, cluster):
    head, _, remove = cluster
    drives = DriveSetConfig(count=2, transport=f"ray://{fleet}", recovery_s=6.0)

    def open_at_all() -> bool:
        """Whether they are up, and Ray has not just noticed that one of them was on a node that is gone."""
        try:
            with open_drives(drives):
                return True
        except (DriveError, ConnectionError):
            return False

    until(open_at_all)
    before = members(fleet)
    lost = next(name for name in ("drive1", "drive0") if before[name].node != head)
    with open_drives(drives) as devices:
        _, _, step = decoder(devices)
        step()
        remove(before[lost].node)
        with pytest.raises(DriveError, match=rf"{lost}\..* KV heads \d.* are lost") as raised:
            for _ in range(200):  # its server ends soon after its node
                step()
                time.sleep(0.1)
        assert "\n" not in str(raised.value)
    generation = before[lost].generation
    until(lambda: members(fleet)[lost].generation > generation and members(fleet)[lost].state == "up")
    assert members(fleet)[lost].nqn != before[lost].nqn


@contextmanager
def local_fleet(drives):
    done = vcsd("fleet", "up", "--local", drives)
    assert done.returncode == 0, done.stderr
    local = json.loads(local_file().read_text())
    try:
        yield local
    finally:
        vcsd("fleet", "down")


def test_local_fleet_ends_with_its_process(ray_here):
    other = run_dir() / "fleet-0ther"
    other.mkdir()
    with local_fleet("1") as local:
        assert local_file().stat().st_mode & 0o077 == 0
        assert "a local fleet is up" in vcsd("fleet", "up", "--local", "1").stderr
        (drive,) = json.loads(vcsd("fleet", "status", "-o", "json").stdout)["drives"]
        assert (drive["state"], drive["host"]) == ("up", "127.0.0.1")
        os.kill(local["pid"], signal.SIGKILL)
        until(lambda: not is_running(local["pid"]) and not is_running(drive["pid"]))
        for words in (("fleet", "status"), ("run", "--drives", "ray")):
            done = vcsd(*words)
            assert done.returncode == 1 and "process of the local fleet has exited" in done.stderr
        assert vcsd("fleet", "down").stderr.endswith("the fleet is down\n")
    assert not [*run_dir().glob(f"*-{local['fleet']}")] and not Path(local["ray_dir"]).exists()
    other.rmdir()  # files of others stay
    assert "no Ray cluster answers at 127.0.0.1:1" in vcsd("fleet", "down").stderr
