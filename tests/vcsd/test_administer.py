"""Administration from the command line, for served drives and for drives in folders.

partner of: vcsd_cli/drive.py, vcsd_cli/config.py
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_link.served_drive import ADMIN
from csd_spec import DriveError, Flush, KvAppend, KvRead, SeqCreate
from host_driver.prefixes.store import PrefixStore
from tests.host_driver.prefixes.prompts import NAMES, rows
from tests.served import serving, window_of
from tests.vcsd_cli.test_main import vcsd
from vcsd.administer import read_log

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.usefixtures("own_run_dir")


@pytest.fixture
def kept(small_drive, tmp_path):
    """A drive with a sequence and some blocks, in a folder."""
    device = InProcessDrive(small_drive, tmp_path / "kept")
    handle = device.submit(SeqCreate(1, 1, 2, 16, 512), 0).result().data[0].tolist()
    rows = np.ones((100, 2, 16), np.float16)
    device.submit(KvAppend(tuple(handle), 0, np.array([100]), rows, rows), 0).result()
    device.submit(Flush(), 0).result()
    device.close()
    return tmp_path / "kept"


@pytest.fixture
def one(tmp_path):
    """A served drive."""
    with serving(tmp_path, "one"):
        yield window_of("one")


def say(capsys, monkeypatch, *args):
    code, out, err = vcsd(capsys, monkeypatch, *args, "-o", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_served_drive_is_administered_during_decode(capsys, monkeypatch, one, tmp_path):
    device = one()
    handle = tuple(device.submit(SeqCreate(1, 1, 1, 64, 512), 0).result().data[0].tolist())
    rows = np.ones((200, 1, 64), np.float16)
    device.submit(KvAppend(handle, 0, np.array([200]), rows, rows), 0).result()
    smart = say(capsys, monkeypatch, "drive", "log", "one", "smart")
    assert (smart["sequences"], smart["host_write_commands"], smart["media_errors"]) == (1, 1, 0)
    assert smart["data_units_written"] > 0
    keys = {"percent_used", "avail_spare", "controller_busy_time", "power_cycles", "host_read_commands"}
    assert keys <= set(smart)
    assert say(capsys, monkeypatch, "drive", "log", "one", "latency")["KvAppend"]["commands"] == 1
    names = [each["name"] for each in say(capsys, monkeypatch, "drive", "log", "one", "programs")["programs"]]
    assert {"dense", "sparf"} <= set(names)
    assert say(capsys, monkeypatch, "drive", "show", "one")["controller"]["sn"] == "one"
    assert say(capsys, monkeypatch, "drive", "show", "one")["namespace"]["lba_bytes"] == 4096
    assert list(say(capsys, monkeypatch, "drive", "top")["drives"]) == ["one"]
    (listed,) = say(capsys, monkeypatch, "drive", "list")["drives"]
    assert listed["served"]
    code, out, _ = vcsd(capsys, monkeypatch, "drive", "passthru", "one", "--opcode", "0x12", "-o", "json")
    assert (code, json.loads(out)["status_name"]) == (1, "invalid_opcode")
    file = tmp_path / "smart"
    raw = ["drive", "passthru", "one", "--opcode", "0xca", "-p", "2", "--output-file", str(file)]
    assert say(capsys, monkeypatch, *raw)["data_bytes"] == len(file.read_bytes())
    assert json.loads(file.read_bytes())["sequences"] == 1
    errors = say(capsys, monkeypatch, "drive", "log", "one", "error")["errors"]
    assert "0x12" in errors[0]["reason"]
    assert device.submit(KvRead(handle, 0), 0).result().data[0].shape == (200, 1, 64)
    device.close()
    for refused in (["drive", "format", "one", "--yes"], ["drive", "copy", "one", str(tmp_path / "copy")]):
        code, out, err = vcsd(capsys, monkeypatch, *refused)
        assert (code, out) == (1, "")
        assert "stop vcsd drive serve" in err


def test_administrator_cannot_read_tenant_sequences(one):
    device = one()
    handle = device.submit(SeqCreate(1, 1, 1, 64, 512), 0).result().data[0].tolist()[0]
    seen = window_of("one", ADMIN)()
    assert seen.submit(KvRead((handle,), 0), 0).result().status.name == "UNKNOWN_SEQUENCE"
    device.close(), seen.close()


def test_a_drive_that_refuses_is_named(small_drive):
    device = InProcessDrive(small_drive)
    with pytest.raises(DriveError, match="drive small: invalid field: page = 119"):
        read_log(device, 0x77)
    device.close()


def test_formatted_drive_stays_empty(capsys, monkeypatch, kept):
    before = say(capsys, monkeypatch, "drive", "log", str(kept), "wear")
    code, _, err = vcsd(capsys, monkeypatch, "drive", "format", str(kept))
    assert code == 1
    assert "--yes" in err
    assert say(capsys, monkeypatch, "drive", "format", str(kept), "--yes")["sequences_freed"] == 1
    assert say(capsys, monkeypatch, "drive", "log", str(kept), "smart")["sequences"] == 0
    after = say(capsys, monkeypatch, "drive", "log", str(kept), "wear")
    assert after["erase_mean"] > before["erase_mean"]
    assert after["free_blocks"] > before["free_blocks"]


def test_snapshot_of_never_served_drive_is_empty(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VCSD_HOME", str(tmp_path / "home"))
    assert vcsd(capsys, monkeypatch, "drive", "create", "new")[0] == 0
    assert vcsd(capsys, monkeypatch, "drive", "copy", "new", str(tmp_path / "copy"))[0] == 0
    assert say(capsys, monkeypatch, "drive", "log", str(tmp_path / "copy"), "smart")["sequences"] == 0


def test_created_drive_has_requested_namespace_size(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VCSD_HOME", str(tmp_path / "home"))
    assert vcsd(capsys, monkeypatch, "drive", "create", "new", "--namespace-mib", "64")[0] == 0
    namespace = say(capsys, monkeypatch, "drive", "show", "new")["namespace"]
    assert namespace == {"nsze": 16384, "ncap": 16384, "nuse": 0, "lba_bytes": 4096}
    code, _, err = vcsd(capsys, monkeypatch, "drive", "create", "large", "--namespace-mib", str(1 << 21))
    assert code and "must be 0 to 1,099,511,627,776 bytes on this drive" in err
    assert vcsd(capsys, monkeypatch, "drive", "create", "large")[0] == 0


def test_snapshot_into_drives_own_folder_is_refused(capsys, monkeypatch, kept):
    for target in (kept / "copy", kept):
        code, _, err = vcsd(capsys, monkeypatch, "drive", "copy", str(kept), str(target))
        assert code and "must be outside of" in err
    assert not (kept / "copy").exists()


def test_a_dry_run_sends_nothing(capsys, monkeypatch):
    shown = say(capsys, monkeypatch, "drive", "passthru", "nowhere", "--opcode", "0x00", "--dry-run")
    assert shown["reads_as"] == "Flush"
    assert len(bytes.fromhex(shown["entry"])) == 64


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("drives: []", "there is none"),
        ("drives: 5", "drives: must be a valid array"),
        ("drives: [{name: a}, {name: a}]", "twice"),
        ("drives: [{name: a/b}]", "letters"),
        ("drives: [{name: a, colour: red}]", "colour"),
        ("drives: [{name: a, drive: nothing.yaml}]", "nothing.yaml"),
        ("drives: [{name: a, tenants: [x, x]}]", "each once"),
        ("drives: [{name: a, layout: {depth: 0}}]", "depth"),
        ("drives: [{name: a}]\nrestrat: false", "restrat"),
        ("{", "while parsing"),
        ("name: x", "missing"),
    ],
)
def test_a_bad_config_is_refused_with_its_reason(capsys, monkeypatch, tmp_path, text, reason):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    code, out, err = vcsd(capsys, monkeypatch, "config", "validate", str(file))
    assert (code != 0, out) == (True, "")
    assert len(err.strip().splitlines()) == 1
    assert reason in err


@pytest.mark.parametrize("what", ["drive", "drives"])
def test_printed_schema_equals_documented_schema(capsys, monkeypatch, what):
    code, out, _ = vcsd(capsys, monkeypatch, "config", "show", "--schema", what)
    assert (code, out) == (0, (DOCS / f"{what}.schema.json").read_text())


def test_valid_config_prints_its_content(capsys, monkeypatch, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("drives: [{name: a}, {name: b, drive: instcsd-overlapped, tenants: [x, y]}]\nrestart: false\n")
    assert set(say(capsys, monkeypatch, "config", "validate", str(file))) == {"valid", "a", "b"}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["drive", "log", "nothing", "smart"], "no drive 'nothing'"),
        (["drive", "show", "/nowhere"], "no drive in /nowhere"),
        (["drive", "format", "/nowhere", "--yes"], "no drive in /nowhere"),
        (["drive", "passthru", "x", "--opcode", "0xca"], "no drive x is served"),
        (["drive", "passthru", "x", "--opcode", "abc"], "--opcode 'abc': must be a number"),
        (["drive", "passthru", "x", "--opcode", "300", "--dry-run"], "--opcode 0x12c"),
        (["drive", "passthru", "x", "--opcode", "1", "-p", "-1", "--dry-run"], "32-bit"),
        (["drive", "top"], "no drive is served"),
        (["drive", "serve", "nothing"], "no drive 'nothing'"),
        (["drive", "serve", "/nowhere.yaml"], "/nowhere.yaml"),
        (["run", "--transport", "pigeon"], "--transport 'pigeon'"),
        (["run", "--transport", "window"], "needs a path"),
        (["guest", "load", "--dry-run", "--cpus", "a"], "--cpus a"),
        (["guest", "load", "--module", "/nowhere.ko"], "/nowhere.ko"),
        (["guest", "load"], "--module nvmev.ko"),
        (["config", "show", "instcsd-overlapped", "--schema", "drive"], "--schema drive"),
        (["drive", "log", "x", "wear", "--tenant", "y"], "--tenant y has no effect on the wear page"),
        (["verify", "commands", "--count", "0"], "--count"),
        (["verify", "kills", "--workers", "3"], "--workers has no effect on kills"),
    ],
)
def test_invalid_input_is_one_line_error(capsys, monkeypatch, args, reason):
    code, out, err = vcsd(capsys, monkeypatch, *args)
    assert (code != 0, out) == (True, "")
    assert len(err.strip().splitlines()) == 1
    assert reason in err


@pytest.mark.parametrize("command", ["run -o json --transport window:{}", "drive serve {}.yaml --window-device {}"])
def test_file_with_foreign_content_is_not_overwritten(tmp_path, command):
    file = tmp_path / "letters"
    file.write_bytes(b"Dear all, " * 1000)
    (tmp_path / "letters.yaml").write_text("drives: [{name: a}]")
    words = command.replace("{}", str(file)).split()
    main = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]
    done = subprocess.run([*main, *words], capture_output=True, text=True, check=False)
    assert done.returncode and not done.stdout
    assert "something else" in done.stderr
    assert file.read_bytes() == b"Dear all, " * 1000


def test_prefixes_of_a_drive_are_listed_by_model(capsys, monkeypatch, small_drive, one, tmp_path):
    names, tokens = replace(NAMES, drives=1), list(range(40))
    folder = str(tmp_path / "flash")
    for device in (one(), InProcessDrive(small_drive, Path(folder))):
        PrefixStore([device], names).store(names.keys(tokens), *rows(tokens))
        device.submit(Flush(), 0).result()
        device.close()
    for drive in ("one", folder):
        result = say(capsys, monkeypatch, "drive", "log", drive, "prefixes")["models"]
        assert [(each["model"]["name"], each["blocks"]) for each in result] == [("m", 5)]
    code, out, _ = vcsd(capsys, monkeypatch, "drive", "log", "one", "prefixes")
    assert code == 0 and names.model.digest[:8] in out and "identity" in out
    for drive, reason in (
        ("one", "drive one has no window of tenant bob"),
        (folder, "is not served: only tenant default"),
    ):
        code, _, err = vcsd(capsys, monkeypatch, "drive", "log", drive, "prefixes", "--tenant", "bob")
        assert code == 1 and reason in err and err.count("\n") == 1
