"""A drive's folder belongs to one process at a time, and to one drive for good."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from csd_link.connect import who_serves
from nvmevirt_config import SHIPPED
from tests.vcsd_cli.test_main import PROMPT, vcsd

pytestmark = pytest.mark.usefixtures("own_run_dir")

COMMAND = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]
RUN = ("run", "--prompt", PROMPT, "--max-new-tokens", "3", "--drives", "1", "-o", "json")


@pytest.fixture
def kept(tmp_path, capsys, monkeypatch):
    """A folder in which a run has left a drive."""
    assert vcsd(capsys, monkeypatch, *RUN, "--keep", str(tmp_path / "kept"))[0] == 0
    return tmp_path / "kept" / "drive0"


@pytest.fixture
def served(kept, tmp_path):
    """The same folder, served under a name that says nothing of it."""
    kept.chmod(0o700)
    config = tmp_path / "drives.yaml"
    config.write_text(yaml.safe_dump({"drives": [{"name": "other", "path": str(kept)}]}))
    server = subprocess.Popen([*COMMAND, "serve", str(config), "--quiet"])
    while not who_serves("other"):
        assert server.poll() is None
        time.sleep(0.02)
    yield kept
    server.terminate()
    server.wait()


def sizes(folder):
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def refused(capsys, monkeypatch, *words):
    """The one line that a command which must not do anything says."""
    code, out, err = vcsd(capsys, monkeypatch, *words)
    assert (code, out) == (1, "")
    assert len(err.strip().splitlines()) == 1
    return err


@pytest.mark.parametrize("transport", ["inproc", "process"])
def test_a_served_folder_is_nobody_elses(served, capsys, monkeypatch, tmp_path, transport):
    before = sizes(served)
    pid = (served / "lock").read_text().strip()
    words = (*RUN, "--keep", str(served.parent), "--transport", transport)
    assert f"process {pid} has this drive's folder" in refused(capsys, monkeypatch, *words)
    assert sizes(served) == before


def test_a_served_folder_is_not_formatted_copied_or_served_again(served, capsys, monkeypatch, tmp_path):
    pid = (served / "lock").read_text().strip()
    for words in (("format", str(served), "--yes"), ("snapshot", str(served), str(tmp_path / "copy"))):
        assert f"process {pid} has this drive's folder" in refused(capsys, monkeypatch, *words)
    assert not (tmp_path / "copy").exists()
    (tmp_path / "again.yaml").write_text(yaml.safe_dump({"drives": [{"name": "third", "path": str(served)}]}))
    again = subprocess.run(
        [*COMMAND, "serve", str(tmp_path / "again.yaml")], capture_output=True, text=True, check=False
    )
    assert (again.returncode, f"process {pid} has" in again.stderr) == (1, True)
    code, out, _ = vcsd(capsys, monkeypatch, "log", "wear", str(served), "-o", "json")
    assert (code, json.loads(out)["pages_groups"] > 0) == (0, True)  # who only looks may look


def test_a_created_drive_that_is_served_under_another_name_is_not_deleted(capsys, monkeypatch, tmp_path):
    assert vcsd(capsys, monkeypatch, "create", "mine")[0] == 0
    folder = tmp_path / "home" / "mine"
    config = tmp_path / "drives.yaml"
    config.write_text(yaml.safe_dump({"drives": [{"name": "alias", "path": str(folder)}]}))
    server = subprocess.Popen([*COMMAND, "serve", str(config), "--quiet"])
    while not who_serves("alias"):
        assert server.poll() is None
        time.sleep(0.02)
    assert "has this drive's folder" in refused(capsys, monkeypatch, "delete", "mine")
    assert folder.exists()
    server.terminate()
    server.wait()
    assert vcsd(capsys, monkeypatch, "delete", "mine")[0] == 0


def test_a_folder_is_free_again_when_its_process_is_killed(kept, capsys, monkeypatch, tmp_path):
    code = "import sys, time; from pathlib import Path; from csd_firmware import InProcessDevice\n"
    code += "device = InProcessDevice.reopen(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(kept)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"open\n"
    assert f"process {process.pid} has" in refused(capsys, monkeypatch, "format", str(kept), "--yes")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert vcsd(capsys, monkeypatch, "format", str(kept), "--yes")[0] == 0


@pytest.mark.parametrize("transport", ["inproc", "process"])
def test_a_drive_of_another_geometry_is_refused_and_nothing_is_cut(kept, capsys, monkeypatch, tmp_path, transport):
    values = yaml.safe_load((SHIPPED / "instcsd-zynq7045-8ch.yaml").read_text())
    values["geometry"]["blocks_per_plane"] = 64
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    kept.chmod(0o700)
    before, text = sizes(kept), (kept / "drive.json").read_text()
    words = (*RUN, "--keep", str(kept.parent), "--drive", str(tmp_path / "small.yaml"), "--transport", transport)
    err = refused(capsys, monkeypatch, *words)
    assert "blocks_per_plane = 4096, and blocks_per_plane = 64 is asked for: name the drive" in err
    assert (sizes(kept), (kept / "drive.json").read_text()) == (before | {"lock": sizes(kept)["lock"]}, text)
    (kept / "drive.json").write_text("")  # as a drive that was killed while it wrote has left it
    assert "content.bin: has" in refused(capsys, monkeypatch, *words)
    assert vcsd(capsys, monkeypatch, *RUN, "--keep", str(kept.parent))[0] == 0
    assert (kept / "drive.json").read_text() == text


def test_a_description_is_not_written_again_where_it_is_the_same(kept, capsys, monkeypatch, tmp_path):
    before = (kept / "drive.json").stat()
    assert vcsd(capsys, monkeypatch, *RUN, "--keep", str(kept.parent))[0] == 0
    after = (kept / "drive.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_new_description_is_put_in_place_whole(kept, capsys, monkeypatch, tmp_path):
    values = yaml.safe_load((SHIPPED / "instcsd-zynq7045-8ch.yaml").read_text())
    values["timing"]["read_ns"] = 40_000  # not geometry: it may change
    (tmp_path / "faster.yaml").write_text(yaml.safe_dump(values))
    text, replace = (kept / "drive.json").read_text(), os.replace
    words = (*RUN, "--keep", str(kept.parent), "--drive", str(tmp_path / "faster.yaml"))

    def killed(*_):
        raise OSError("killed before the last step")

    monkeypatch.setattr(os, "replace", killed)
    refused(capsys, monkeypatch, *words)
    assert (kept / "drive.json").read_text() == text
    monkeypatch.setattr(os, "replace", replace)
    assert vcsd(capsys, monkeypatch, *words)[0] == 0
    assert json.loads((kept / "drive.json").read_text())["timing"]["read_ns"] == 40_000
