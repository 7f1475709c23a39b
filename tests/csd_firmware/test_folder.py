"""A drive's folder belongs to one process at a time, and permanently to one drive."""

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial

import pytest
import yaml

from csd_firmware import InProcessDrive
from csd_firmware.folder import describe, secret_of
from csd_firmware.fsck import fsck
from csd_io.folder import DiskFile
from csd_link.connect import find_server
from csd_spec import Flush
from ftl.flash.files import sizes as nand_files
from nvmevirt_config import SHIPPED
from tests.served import until
from tests.vcsd_cli.test_main import PROMPT, vcsd

pytestmark = pytest.mark.usefixtures("own_run_dir")

COMMAND = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]
RUN = ("run", "--prompt", PROMPT, "--max-new-tokens", "3", "--drives", "1", "--no-compare", "-o", "json")


@pytest.fixture
def kept(tmp_path, capsys, monkeypatch):
    """A folder in which a run has left a drive."""
    assert vcsd(capsys, monkeypatch, *RUN, "--data-dir", str(tmp_path / "kept"))[0] == 0
    return tmp_path / "kept" / "drive0"


@pytest.fixture
def served(kept, tmp_path):
    """The same folder, served under an unrelated name."""
    kept.chmod(0o700)
    config = tmp_path / "drives.yaml"
    config.write_text(yaml.safe_dump({"drives": [{"name": "other", "path": str(kept)}]}))
    server = subprocess.Popen([*COMMAND, "drive", "serve", str(config), "--quiet"])
    until(lambda: find_server("other") or server.poll() is not None)
    yield kept
    server.terminate()
    server.wait()


def sizes(folder):
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def refused(capsys, monkeypatch, *words):
    """The only line printed by a command that must be refused, without lines of progress on a slow machine."""
    code, out, err = vcsd(capsys, monkeypatch, *words)
    lines = [line for line in err.strip().splitlines() if not re.fullmatch(r"[a-z ]+(: \d+ of \d+)?, \d+ s", line)]
    assert (code, out, len(lines)) == (1, "", 1)
    return lines[0]


@pytest.mark.parametrize("transport", ["inproc", "process"])
def test_served_folder_refuses_second_process(served, capsys, monkeypatch, tmp_path, transport):
    before = sizes(served)
    pid = (served / "lock").read_text().strip()
    words = (*RUN, "--data-dir", str(served.parent), "--transport", transport)
    assert f"process {pid} has this drive's folder" in refused(capsys, monkeypatch, *words)
    assert sizes(served) == before


def test_served_folder_refuses_format_copy_and_serve(served, capsys, monkeypatch, tmp_path):
    pid = (served / "lock").read_text().strip()
    for words in (("drive", "format", str(served), "--yes"), ("drive", "copy", str(served), str(tmp_path / "copy"))):
        assert f"process {pid} has this drive's folder" in refused(capsys, monkeypatch, *words)
    assert not (tmp_path / "copy").exists()
    (tmp_path / "again.yaml").write_text(yaml.safe_dump({"drives": [{"name": "third", "path": str(served)}]}))
    again = subprocess.run(
        [*COMMAND, "drive", "serve", str(tmp_path / "again.yaml")], capture_output=True, text=True, check=False
    )
    assert (again.returncode, f"process {pid} has" in again.stderr) == (1, True)
    code, out, _ = vcsd(capsys, monkeypatch, "drive", "log", str(served), "wear", "-o", "json")
    assert (code, json.loads(out)["pages_groups"] > 0) == (0, True)  # a reader needs no lock


def test_delete_drive_served_under_other_name_refused(capsys, monkeypatch, tmp_path):
    assert vcsd(capsys, monkeypatch, "drive", "create", "mine")[0] == 0
    folder = tmp_path / "home" / "mine"
    config = tmp_path / "drives.yaml"
    config.write_text(yaml.safe_dump({"drives": [{"name": "alias", "path": str(folder)}]}))
    server = subprocess.Popen([*COMMAND, "drive", "serve", str(config), "--quiet"])
    until(lambda: find_server("alias") or server.poll() is not None)
    assert "has this drive's folder" in refused(capsys, monkeypatch, "drive", "delete", "mine")
    assert folder.exists()
    server.terminate()
    server.wait()
    assert vcsd(capsys, monkeypatch, "drive", "delete", "mine")[0] == 0


def test_a_folder_is_free_again_when_its_process_is_killed(kept, capsys, monkeypatch, tmp_path):
    code = "import sys, time; from pathlib import Path; from csd_firmware import InProcessDrive\n"
    code += "device = InProcessDrive.reopen(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(kept)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"open\n"
    assert f"process {process.pid} has" in refused(capsys, monkeypatch, "drive", "format", str(kept), "--yes")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert vcsd(capsys, monkeypatch, "drive", "format", str(kept), "--yes")[0] == 0


@pytest.mark.parametrize("transport", ["inproc", "process"])
def test_other_geometry_refused_files_unchanged(kept, capsys, monkeypatch, tmp_path, transport):
    values = yaml.safe_load((SHIPPED / "instcsd-zynq7045-8ch.yaml").read_text())
    values["geometry"]["blocks_per_plane"] = 64
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    kept.chmod(0o700)
    before, text = sizes(kept), (kept / "drive.json").read_text()
    words = (
        *RUN,
        "--data-dir",
        str(kept.parent),
        "--drive-config",
        str(tmp_path / "small.yaml"),
        "--transport",
        transport,
    )
    err = refused(capsys, monkeypatch, *words)
    assert "blocks_per_plane = 4096, but blocks_per_plane = 64 is requested: use the original description" in err
    assert (sizes(kept), (kept / "drive.json").read_text()) == (before | {"lock": sizes(kept)["lock"]}, text)
    (kept / "drive.json").write_text("")  # as a drive that was killed while it wrote has left it
    assert "content.bin: has" in refused(capsys, monkeypatch, *words)
    assert vcsd(capsys, monkeypatch, *RUN, "--data-dir", str(kept.parent))[0] == 0
    assert (kept / "drive.json").read_text() == text


def test_unchanged_description_is_not_rewritten(kept, capsys, monkeypatch, tmp_path):
    before = (kept / "drive.json").stat()
    assert vcsd(capsys, monkeypatch, *RUN, "--data-dir", str(kept.parent))[0] == 0
    after = (kept / "drive.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_new_description_replaces_old_atomically(kept, capsys, monkeypatch, tmp_path):
    values = yaml.safe_load((SHIPPED / "instcsd-zynq7045-8ch.yaml").read_text())
    values["timing"]["read_ns"] = 40_000  # not geometry: it may change
    (tmp_path / "faster.yaml").write_text(yaml.safe_dump(values))
    text, replace = (kept / "drive.json").read_text(), os.replace
    words = (*RUN, "--data-dir", str(kept.parent), "--drive-config", str(tmp_path / "faster.yaml"))

    def killed(*_):
        raise OSError("killed before the last step")

    monkeypatch.setattr(os, "replace", killed)
    refused(capsys, monkeypatch, *words)
    assert (kept / "drive.json").read_text() == text
    monkeypatch.setattr(os, "replace", replace)
    assert vcsd(capsys, monkeypatch, *words)[0] == 0
    assert json.loads((kept / "drive.json").read_text())["timing"]["read_ns"] == 40_000


def test_description_and_secret_without_checksums_are_refused(tmp_path, small_drive):
    """One flipped bit in the name of a description's format must not pass for a file without checksums."""
    describe(small_drive, tmp_path)
    (tmp_path / "secret.bin").write_bytes(bytes(32))
    with pytest.raises(ValueError, match=r"secret\.bin is damaged"):
        secret_of(tmp_path)
    text = (tmp_path / "drive.json").read_bytes()
    values = json.loads(text)
    (tmp_path / "drive.json").write_bytes(text.replace(b'"format"', b'"formau"'))
    describe(small_drive, tmp_path)  # corrected
    assert json.loads((tmp_path / "drive.json").read_bytes()) == values
    (tmp_path / "drive.json").write_text(json.dumps({name: values[name] for name in values if name != "format"}))
    with pytest.raises(ValueError, match="format None: this version knows"):
        describe(small_drive, tmp_path)


def test_bit_flip_in_description_or_secret_is_corrected(tmp_path, small_drive):
    describe(small_drive, tmp_path)
    text, secret = (tmp_path / "drive.json").read_bytes(), secret_of(tmp_path)
    (tmp_path / "drive.json").write_bytes(text[:100] + bytes([text[100] ^ 1]) + text[101:])
    InProcessDrive(small_drive, tmp_path).close()
    assert (tmp_path / "drive.json").read_bytes() == text
    (tmp_path / "drive.json").write_bytes(text[:100] + bytes([text[100] ^ 3]) + text[101:])
    with pytest.raises(ValueError, match=r"no drive in .* drive.json"):
        InProcessDrive(small_drive, tmp_path)
    secret_before = (tmp_path / "secret.bin").read_bytes()
    (tmp_path / "secret.bin").write_bytes(bytes([secret_before[0] ^ 1]) + secret_before[1:])
    assert secret_of(tmp_path) == secret and (tmp_path / "secret.bin").read_bytes() == secret_before
    (tmp_path / "secret.bin").write_bytes(bytes([secret_before[0] ^ 3]) + secret_before[1:])
    with pytest.raises(ValueError, match=r"secret.bin is damaged"):
        secret_of(tmp_path)


def test_full_disk_refused_before_drive_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ftl.flash.nand.MARGIN_BYTES", 1 << 62)  # of the disk under the folder
    err = refused(capsys, monkeypatch, *RUN, "--data-dir", str(tmp_path / "kept"))
    assert "capacity exceeded" in err and "drive0 has no room for them" in err


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_failing_disk_one_line_error_keeps_flushed_data(kept, error, capsys, monkeypatch):
    before, write, count = say_smart(capsys, monkeypatch, kept), DiskFile.write, itertools.count()

    def failing(self, offset, data):
        if next(count) > 40:
            raise OSError(error, os.strerror(error), str(self.path))
        write(self, offset, data)

    monkeypatch.setattr(DiskFile, "write", failing)
    err = refused(capsys, monkeypatch, *RUN, "--data-dir", str(kept.parent))
    assert f"{os.strerror(error)}; flushed data is safe" in err
    monkeypatch.undo()
    assert say_smart(capsys, monkeypatch, kept)["sequences"] == before["sequences"]
    assert vcsd(capsys, monkeypatch, "drive", "fsck", str(kept), "--dry-run")[0] == 0


def say_smart(capsys, monkeypatch, folder):
    return json.loads(vcsd(capsys, monkeypatch, "drive", "log", str(folder), "smart", "-o", "json")[1])


def killed(small_drive, path):
    """Open a drive, and drop it as a kill would: the lock goes, nothing else is done."""
    drive = InProcessDrive(small_drive, path)
    drive._folder._lock.close()
    return drive.firmware.ftl.counters


def test_power_ons_and_unsafe_shutdowns_are_counted_without_a_flush(small_drive, tmp_path):
    for times in range(1, 4):
        assert killed(small_drive, tmp_path).power_cycles == times
    for unsafe in (3, 3):
        with closing(InProcessDrive(small_drive, tmp_path)) as drive:
            counters = drive.firmware.ftl.counters
            assert counters.unsafe_shutdowns == unsafe
            with closing(InProcessDrive(small_drive, tmp_path, private=True)) as look:  # while the drive runs
                seen = look.firmware.ftl.counters
                assert (seen.power_cycles, seen.unsafe_shutdowns) == (counters.power_cycles, unsafe)
            drive.submit(Flush(), 0).result()
    (tmp_path / "power.json").write_bytes(b'{"on": 1e999')
    with closing(InProcessDrive(small_drive, tmp_path)) as drive:  # the counters of the last flush hold
        counters = drive.firmware.ftl.counters
        assert (counters.power_cycles, counters.unsafe_shutdowns) == (6, 3)


def replaced(path, kind):
    """Put something that is no file of bytes in a file's place."""
    path.unlink(missing_ok=True)
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "loop"])
def test_nothing_waits_for_what_is_not_a_file(small_drive, tmp_path, kind):
    """Each is refused in one line, or replaced; the drive is as before once its file is back."""
    path = tmp_path / "drive"
    with closing(InProcessDrive(small_drive, path)) as drive:
        drive.submit(Flush(), 0).result()
    for file in ("drive.json", "lock", *nand_files(small_drive.geometry)):
        content = (path / file).read_bytes()
        replaced(path / file, kind)
        for use in (partial(InProcessDrive, small_drive, path), partial(InProcessDrive.reopen, path)):
            with pytest.raises((ValueError, OSError)) as error:
                use()
            assert "\n" not in str(error.value)
        with pytest.raises((ValueError, OSError)):
            fsck(path, dry_run=False)
        (path / file).rmdir() if kind == "folder" else (path / file).unlink()
        (path / file).write_bytes(content)
    replaced(path / "power.json", kind)
    InProcessDrive(small_drive, path).close()
