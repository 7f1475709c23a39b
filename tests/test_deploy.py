"""Files of deploy/: what a test can say of them without the programs that read them, and with those that are here."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from csd_link.nvmeof.listen import Listen
from csd_link.served_drive import DEFAULT
from nvmevirt_config.serve_config import load_hosts
from vcsd_cli.main import app

DEPLOY = Path(__file__).parents[1] / "deploy"
MAIN = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]


def options_of(*words):
    command = app.load(words[0])
    return {name for parameter in command.params for name in parameter.opts}


def test_commands_of_deployed_files_have_the_options_that_exist():
    unit = (DEPLOY / "vcsd@.service").read_text()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for text in (unit.partition("vcsd serve")[2].splitlines()[0], compose["services"]["drives"]["command"][-1]):
        asked = {word for word in text.rpartition("vcsd serve")[2].split() if word.startswith("--")}
        assert {"--log-format", "--metrics"} <= asked <= options_of("serve")
    assert "Type=notify" in unit and "KillSignal=SIGTERM" in unit and "KillMode=mixed" in unit


def test_compose_file_is_whole_and_reaches_what_it_names():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"drives", "prometheus", "grafana"}
    scrape = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert service in compose["services"] and f"0.0.0.0:{port}" in compose["services"]["drives"]["command"][-1]
    published = [port for each in compose["services"].values() for port in each.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    grafana = compose["services"]["grafana"]
    (mounted,) = grafana["volumes"]
    assert (DEPLOY / mounted.split(":")[0]).is_file()
    (provider,) = yaml.safe_load(compose["configs"]["dashboards"]["content"])["providers"]
    assert mounted.split(":")[1].startswith(provider["options"]["path"])
    (source,) = yaml.safe_load(compose["configs"]["datasources"]["content"])["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    used = {each["source"] for service in compose["services"].values() for each in service.get("configs", ())}
    assert used == set(compose["configs"])


def test_compose_file_lists_a_host_that_may_connect(tmp_path):
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (tmp_path / "hosts.yaml").write_text(compose["configs"]["hosts"]["content"])
    hosts = load_hosts(tmp_path / "hosts.yaml")
    assert [each.tenant for each in hosts] == [DEFAULT]
    assert Listen.parse("0.0.0.0:4420", ("csd0",), True, hosts).port == 4420


def test_unit_names_a_folder_for_compiled_kernels(tmp_path):
    """Without one, Numba refuses to start where neither the tree nor a home can be written."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "tests", "docs")
    shutil.copytree(DEPLOY.parent, tree, ignore=ignored)
    (cache := tmp_path / "cache").mkdir()
    unit = (DEPLOY / "vcsd@.service").read_text()
    named = dict(
        line.removeprefix("Environment=").split("=", 1) for line in unit.splitlines() if "Environment=" in line
    )
    assert named["NUMBA_CACHE_DIR"] == "/var/cache/vcsd" and "CacheDirectory=vcsd\n" in unit
    given = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    code = "import csd_firmware.short as module; print(module.__file__)"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd="/", env=given, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tree)), done.stderr


def test_compose_file_installs_from_a_copy_of_its_read_only_mount():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    drives = compose["services"]["drives"]
    assert "..:/src:ro" in drives["volumes"]
    assert "cp -r /src /tmp/src && pip install --quiet /tmp/src" in drives["command"][-1]


def test_docker_reads_the_compose_file():
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no docker compose")
    command = [docker, "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_systemd_reads_the_unit(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / "vcsd@drives.service"
    text = (DEPLOY / "vcsd@.service").read_text()
    unit.write_text(text.replace("/opt/vcsd/bin/vcsd", shutil.which("true") or "/bin/true"))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "vcsd" in line and "Failed to" not in line]
    assert not ours, done.stderr


@pytest.mark.usefixtures("own_run_dir")
def test_a_server_as_deployed_logs_json_serves_metrics_and_stops_in_good_order():
    assert subprocess.run([*MAIN, "create", "one"], capture_output=True, check=False).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ready, tells = os.pipe()
    words = ["serve", "--log-format", "json", "--metrics", f"127.0.0.1:{port}", "--ready-fd", str(tells)]
    server = subprocess.Popen([*MAIN, *words], pass_fds=[tells], stderr=subprocess.PIPE, text=True)
    os.close(tells)
    try:
        assert os.read(ready, 64) == b"READY=1\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert 'vcsd_drive_power_ons_total{drive="one"}' in answer.read().decode()
    finally:
        os.close(ready)
        server.send_signal(signal.SIGTERM)
        said = [json.loads(line) for line in server.communicate()[1].splitlines()]
    assert server.returncode == 0
    assert {"drive_started", "stopped"} <= {each["event"] for each in said}
    assert said[-1]["message"] == "all drives are flushed and stopped" and said[-1]["level"] == "info"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.usefixtures("own_run_dir")
def test_an_address_of_metrics_that_is_none_or_taken_is_one_line():
    assert subprocess.run([*MAIN, "create", "one"], capture_output=True, check=False).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address, says in (("9464", "must be HOST:PORT"), (f"127.0.0.1:{taken.getsockname()[1]}", "already in use")):
            done = subprocess.run([*MAIN, "serve", "--metrics", address], capture_output=True, text=True, check=False)
            assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
