"""`vcsd drive serve`, `create`, `list`, `delete`, as a user calls them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from csd_io.medium import Medium
from csd_link.connect import find_server
from csd_link.hosting import HostingOptions
from csd_link.nvmeof.host import discover
from csd_link.nvmeof.listen import nqn_of
from csd_link.nvmeof.subsystem import DiscoveryRecord
from csd_link.run_dir import window_path
from csd_link.served_drive import ServedDrive, ServedDrives
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_config
from tests.served import free_port, until
from tests.vcsd_cli.test_main import vcsd as in_process
from vcsd_cli.serve import PlacementOptions, _apply_options, find_created

pytestmark = pytest.mark.usefixtures("own_run_dir")


def vcsd(*words):
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_create_list_serve_delete(tmp_path):
    assert vcsd("drive", "create", "one").returncode == 0
    assert "exists" in vcsd("drive", "create", "one").stderr
    for name in ("", ".", ".."):
        assert "letters" in vcsd("drive", "create", name).stderr
    assert "letters" in vcsd("drive", "create", "a/b").stderr
    assert "nowhere.yaml" in vcsd("drive", "create", "two", "--drive-config", "/nowhere.yaml").stderr
    server = subprocess.Popen(
        [sys.executable, "-c", "from vcsd_cli.main import main; main()", "drive", "serve", "--quiet"]
    )
    try:
        until(lambda: json.loads(vcsd("drive", "list", "-o", "json").stdout)["drives"][0]["served"])
        (drive,) = json.loads(vcsd("drive", "list", "-o", "json").stdout)["drives"]
        assert drive["window"].endswith("window-default")
        assert "served already" in vcsd("drive", "serve", "one").stderr
        assert "stop" in vcsd("drive", "delete", "one").stderr
    finally:
        server.terminate()
        assert server.wait() == 0
    assert vcsd("drive", "delete", "one").returncode == 0
    assert json.loads(vcsd("drive", "list", "-o", "json").stdout) == {"drives": []}
    assert "no drive 'one'" in vcsd("drive", "delete", "one").stderr


def test_hosting_options_of_drive_are_kept():
    words = ("--durability", "host", "--medium", "direct", "--page-buffer-mib", "3", "--threads", "2")
    assert vcsd("drive", "create", "one", *words).returncode == 0
    config = load_config(find_created("one"))
    given = {"durability": "host", "medium": "direct", "page_buffer_mib": 3, "threads": 2}
    assert config.drives[0].hosting_fields(1) == given
    assert _apply_options(config, PlacementOptions(), HostingOptions()) == config.drives
    asked = HostingOptions(durability="process", page_buffer_mib=4, threads=1)
    (drive,) = _apply_options(config, PlacementOptions(restart=False), asked)
    assert not drive.restarts
    assert drive.overrides == given | {"durability": "process", "page_buffer_mib": 4, "threads": 1}


def test_drives_of_a_server_share_cores():
    drives = ServedDrives(tuple(ServedDrive(name=name, spec=INSTCSD_ZYNQ7045_8CH, path=Path(name)) for name in "ab"))
    placed = _apply_options(drives, PlacementOptions(), HostingOptions(medium="direct", page_buffer_mib=6))
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(drive.storage, drive.threads) for drive in placed] == [(Medium("direct", 6 << 20), share)] * 2


def test_serve_ready_fd_is_written_when_drives_answer(tmp_path):
    assert vcsd("drive", "create", "one").returncode == 0
    ready, tells = os.pipe()
    command = [
        sys.executable,
        "-c",
        "from vcsd_cli.main import main; main()",
        "drive",
        "serve",
        "--ready-fd",
        str(tells),
    ]
    server = subprocess.Popen(command, pass_fds=[tells], stderr=subprocess.PIPE, text=True)
    try:
        os.close(tells)
        assert os.read(ready, 64) == b"READY=1\n"
        assert find_server("one")
    finally:
        server.terminate()
        os.close(ready)
    said = server.communicate()[1].splitlines()
    assert server.returncode == 0
    assert f"drive one: window {window_path('one')}" in said
    assert vcsd("drive", "serve", "one", "--ready-fd", "63").stderr.startswith(
        "vcsd: --ready-fd 63: Bad file descriptor"
    )


def test_refused_drive_prints_no_window(tmp_path):
    assert vcsd("drive", "create", "one").returncode == 0
    (find_created("one").parent / "spare.bin").unlink()
    done = vcsd("drive", "serve", "one")
    assert done.returncode == 1 and "spare.bin is missing" in done.stderr
    assert "window" not in done.stderr


def test_serve_listens_for_nvme_hosts_and_says_where(tmp_path):
    assert vcsd("drive", "create", "one").returncode == 0
    assert vcsd("drive", "create", "two").returncode == 0
    refused = vcsd("drive", "serve", "--listen", "0.0.0.0:4420")
    assert refused.returncode == 2 and "--listen-remote" in refused.stderr and refused.stderr.count("\n") == 1
    assert "must be HOST:PORT" in vcsd("drive", "serve", "--listen", "4420").stderr
    assert "add --tls-cert FILE --tls-key FILE" in vcsd("drive", "serve", "--tls-ca", "ca.pem").stderr
    refused = vcsd("drive", "serve", "--listen", "127.0.0.1:4420", "--tls-cert", "none.pem", "--tls-key", "none.key")
    assert refused.returncode == 1 and "none.pem: No such file" in refused.stderr and refused.stderr.count("\n") == 1
    (tmp_path / "hosts.yaml").write_text("hosts: {nqn.a: alice}")
    assert "add --listen HOST:PORT" in vcsd("drive", "serve", "--hosts-file", str(tmp_path / "hosts.yaml")).stderr
    refused = vcsd("drive", "serve", "--listen", "127.0.0.1:4420", "--hosts-file", str(tmp_path / "hosts.yaml"))
    assert refused.returncode == 1 and "is tenant 'alice': this drive has default" in refused.stderr
    port = free_port(2)
    with socket.create_server(("127.0.0.1", port)):
        taken = vcsd("drive", "serve", "one", "--listen", f"127.0.0.1:{port}")
        assert taken.returncode == 1 and f"Address already in use: '127.0.0.1:{port}'" in taken.stderr
        assert taken.stderr.count("\n") == 1
    command = [
        sys.executable,
        "-c",
        "from vcsd_cli.main import main; main()",
        "drive",
        "serve",
        "--listen",
        f"localhost:{port}",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = [server.stderr.readline() for _ in range(2)]
        assert f"NVMe/TCP localhost:{port} {nqn_of('one')}" in "".join(said)
        assert discover("127.0.0.1", port) == [
            DiscoveryRecord(nqn_of("one"), port),
            DiscoveryRecord(nqn_of("two"), port + 1),
        ]
    finally:
        server.terminate()
        server.stderr.close()
        assert server.wait() == 0


def test_create_and_delete_print_json(capsys, monkeypatch):
    code, out, _ = in_process(capsys, monkeypatch, "drive", "create", "one", "-o", "json")
    made = json.loads(out)
    assert code == 0 and made["name"] == "one" and made["drive"] == "instcsd-zynq7045-8ch"
    assert (Path(made["folder"]) / "served.yaml").stat().st_mode & 0o777 == 0o600
    assert json.loads(in_process(capsys, monkeypatch, "drive", "delete", "one", "--yes", "-o", "json")[1]) == {
        "name": "one",
        "folder": made["folder"],
    }


def test_delete_on_a_terminal_asks(capsys, monkeypatch):
    assert in_process(capsys, monkeypatch, "drive", "create", "one")[0] == 0
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    code, _, errors = in_process(capsys, monkeypatch, "drive", "delete", "one")
    assert code == 1 and "was not deleted: say --yes" in errors
    assert in_process(capsys, monkeypatch, "drive", "delete", "one", "--yes")[0] == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_port_of_metrics_that_a_drive_takes_is_refused(capsys, monkeypatch, tmp_path, host):
    (tmp_path / "two.yaml").write_text("drives: [{name: a}, {name: b}]")
    words = ["drive", "serve", str(tmp_path / "two.yaml"), "--listen", "127.0.0.1:4420", "--metrics", f"{host}:4421"]
    code, _, err = in_process(capsys, monkeypatch, *words)
    assert code == 2 and err == f"vcsd: --metrics {host}:4421: --listen takes ports 4420 to 4421: choose another port\n"


@pytest.mark.parametrize(
    "entries",
    ["{name: a, mount: m}, {name: b, mount: m/}", "{name: a, methods_file: no.py}", "{name: a, mount: two.yaml}"],
)
def test_validate_and_serve_agree(capsys, monkeypatch, tmp_path, entries):
    (tmp_path / "two.yaml").write_text(f"drives: [{entries}]")
    for words in (["config", "validate"], ["drive", "serve"]):
        code, out, err = in_process(capsys, monkeypatch, *words, str(tmp_path / "two.yaml"))
        assert code and not out and err.count("\n") == 1
