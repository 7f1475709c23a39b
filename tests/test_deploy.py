"""Files of deploy/: checks without the programs that read them, and with those that are installed."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from csd_link.driveset import DriveSetConfig
from csd_spec import SeqCreate, Status
from tests.conftest import missing
from tests.served import free_port
from vcsd.transport import open_drives
from vcsd_cli.main import app

DEPLOY = Path(__file__).parents[1] / "deploy"
MAIN = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]


@contextmanager
def served(*words):
    """`vcsd drive serve` until the block ends, when it gets SIGTERM; it is ready when the block begins."""
    ready, tells = os.pipe()
    command = [*MAIN, "drive", "serve", *words, "--ready-fd", str(tells)]
    with tempfile.TemporaryFile("w+") as stderr:
        server = subprocess.Popen(command, pass_fds=[tells], stderr=stderr, text=True)
        os.close(tells)
        try:
            assert os.read(ready, 64) == b"READY=1\n"
            yield server
        finally:
            os.close(ready)
            server.send_signal(signal.SIGTERM)
            server.wait()
            stderr.seek(0)
            server.stderr = io.StringIO(stderr.read())


def options_of(*words):
    command = dict(app.leaf_commands())[words]
    return {name for parameter in command.params for name in parameter.opts}


def test_commands_of_deployed_files_have_the_options_that_exist():
    unit = (DEPLOY / "vcsd@.service").read_text()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    both, listens = {"--log-format", "--metrics"}, {"--listen", "--listen-remote", "--hosts-file"}
    for text, wanted in ((unit, both), (compose["services"]["drives"]["command"][-1], both | listens)):
        words = text.partition("vcsd drive serve")[2].splitlines()[0].split()
        asked = {word for word in words if word.startswith("--")}
        assert asked == wanted and asked <= options_of("drive", "serve")
    assert "Type=notify" in unit and "KillSignal=SIGTERM" in unit and "KillMode=mixed" in unit


def test_compose_file_is_complete_and_paths_exist():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"drives", "prometheus", "grafana"}
    scrape = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert service in compose["services"] and f"0.0.0.0:{port}" in compose["services"]["drives"]["command"][-1]
    published = [port for each in compose["services"].values() for port in each.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    (mounted,) = compose["services"]["grafana"]["volumes"]
    assert (DEPLOY / mounted.split(":")[0]).is_file()
    for service in compose["services"].values():
        assert all(each["source"] in compose["configs"] for each in service.get("configs", ()))


def test_grafana_finds_its_board_and_a_data_source():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    provided = {
        Path(each["target"]).parent.name: yaml.safe_load(compose["configs"][each["source"]]["content"])
        for each in grafana["configs"]
        if each["target"].startswith("/etc/grafana/provisioning/")
    }
    (source,) = provided["datasources"]["datasources"]
    service, port = source["url"].removeprefix("http://").split(":")
    assert source["type"] == "prometheus" and source["isDefault"]
    assert any(each.endswith(f":{port}") for each in compose["services"][service]["ports"])
    (provider,) = provided["dashboards"]["providers"]
    (mounted,) = grafana["volumes"]
    assert Path(mounted.split(":")[1]).parent == Path(provider["options"]["path"])


@pytest.mark.usefixtures("own_run_dir")
def test_hosts_outside_of_the_container_reach_its_drive(tmp_path):
    """With the options and the hosts of the compose file, at another port of this machine."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    drives = compose["services"]["drives"]
    words = drives["command"][-1].partition("vcsd drive serve ")[2].split()
    (published,) = drives["ports"]
    (mounted,) = drives["configs"]
    assert published.split(":")[2] == words[words.index("--listen") + 1].split(":")[1]
    assert mounted["target"] == words[words.index("--hosts-file") + 1]
    content = compose["configs"][mounted["source"]]["content"]
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(content)
    port, metrics = free_port(), free_port()
    words[words.index("--listen") + 1] = f"0.0.0.0:{port}"
    words[words.index("--metrics") + 1] = f"127.0.0.1:{metrics}"
    words[words.index("--hosts-file") + 1] = str(hosts)
    assert subprocess.run([*MAIN, "drive", "create", "csd0"], capture_output=True, check=False).returncode == 0
    (nqn,) = yaml.safe_load(content)["hosts"]
    with served(*words):
        address = f"nvme+tcp://127.0.0.1:{port}?hostnqn="
        with open_drives(DriveSetConfig(transport=address + nqn)) as (drive,):
            done = drive.submit(SeqCreate(1, 1, 1, 64, 64), 0).result()
            assert done.status is Status.SUCCESS
        with pytest.raises(OSError, match="host"), open_drives(DriveSetConfig(transport=address + "nqn.other:1")):
            pytest.fail("connected")


def copied(tmp_path):
    """The tree without what git ignores, read-only, and a command prefix under which that holds for root too."""
    tree = tmp_path / "src"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(DEPLOY.parent, tree, ignore=ignored, symlinks=True)
    for path in [tree, *tree.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    if os.geteuid():
        return tree, []
    setpriv = shutil.which("setpriv")
    if not setpriv:
        missing("setpriv", "there is no setpriv, and root may write read-only folders")
    return tree, [setpriv, "--bounding-set=-dac_override", "--inh-caps=-dac_override"]


def test_unit_has_a_folder_for_compiled_kernels(tmp_path):
    """partner of: csd_io/compiled.py"""
    tree, prefix = copied(tmp_path)
    lines = [line.partition("=")[::2] for line in (DEPLOY / "vcsd@.service").read_text().splitlines() if "=" in line]
    unit = dict(value.split("=", 1) for name, value in lines if name == "Environment")
    (cache,) = (value for name, value in lines if name == "CacheDirectory")
    folder = tmp_path / "cache"  # as systemd creates it
    folder.mkdir()
    unit = {name: value.replace(f"/var/cache/{cache}", str(folder)) for name, value in unit.items()}
    command = [*prefix, sys.executable, "-c", "import csd_firmware; print(csd_firmware.__file__)"]
    bare = {"PATH": os.environ["PATH"], "HOME": str(tree / "nonexistent"), "PYTHONDONTWRITEBYTECODE": "1"}
    without, within = (
        subprocess.run(command, cwd=tree, env=bare | more, capture_output=True, text=True, check=False)
        for more in ({}, unit)
    )
    assert "no locator available" in without.stderr
    assert within.returncode == 0 and within.stdout.startswith(str(tree)), within.stderr


def test_compose_file_installs_from_a_read_only_mount(tmp_path):
    """As far as it can be without a network: a wheel is built, and dependencies are left out."""
    tree, prefix = copied(tmp_path)
    command = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["drives"]["command"][-1]
    install = command.partition(" && {")[0]
    assert install.rpartition(" && ")[2] == "pip install --quiet '/tmp/src[metrics]'"
    wheel = f"{sys.executable} -m pip wheel --no-deps --no-build-isolation -w {tmp_path}/wheels"
    install = install.replace("/tmp/src", f"{tmp_path}/writable").replace("pip install --quiet", wheel)
    install = install.replace("/src ", f"{tree} ")
    done = subprocess.run([*prefix, "sh", "-c", install], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = (tmp_path / "wheels").glob("vcsd-*.whl")
    assert built.stat().st_size > 1 << 20


def test_docker_reads_the_compose_file():
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        missing("docker", "there is no docker compose")
    command = [docker, "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_systemd_reads_the_unit(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        missing("systemd", "there is no systemd-analyze")
    unit = tmp_path / "vcsd@drives.service"
    text = (DEPLOY / "vcsd@.service").read_text()
    unit.write_text(text.replace("/opt/vcsd/bin/vcsd", shutil.which("true") or "/bin/true"))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "vcsd" in line and "Failed to" not in line]
    assert not ours, done.stderr


@pytest.mark.usefixtures("own_run_dir")
def test_deployed_server_logs_metrics_and_stop():
    assert subprocess.run([*MAIN, "drive", "create", "one"], capture_output=True, check=False).returncode == 0
    port = free_port()
    with served("--log-format", "json", "--metrics", f"127.0.0.1:{port}") as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert 'vcsd_drive_power_ons_total{drive="one"}' in answer.read().decode()
        assert stderr_of(metrics_process(server.pid)) == stderr_of(server.pid)  # no pipe that fills up unread
    said = [json.loads(line) for line in server.stderr.read().splitlines()]
    assert server.returncode == 0
    assert {"drive_started", "stopped"} <= {each["event"] for each in said}
    assert said[-1]["message"] == "all drives are flushed and stopped" and said[-1]["level"] == "info"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port)).close()


def metrics_process(parent):
    """The child that serves metrics."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (result,) = (pid for pid in children if b"vcsd.drive_metrics" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return result


def stderr_of(pid):
    return Path(f"/proc/{pid}/fd/2").readlink()


@pytest.mark.usefixtures("own_run_dir")
def test_invalid_or_taken_metrics_address_is_one_line():
    assert subprocess.run([*MAIN, "drive", "create", "one"], capture_output=True, check=False).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address, says in (("9464", "must be HOST:PORT"), (f"127.0.0.1:{taken.getsockname()[1]}", "already in use")):
            done = subprocess.run(
                [*MAIN, "drive", "serve", "--metrics", address], capture_output=True, text=True, check=False
            )
            assert done.returncode and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
