"""Help, closed pipes, paths, and errors that name the option that was typed.

partner of: vcsd_cli/strict.py
"""

import json
import os
import subprocess
import sys

import pytest

from csd_spec.presets import DRIVES
from nvmevirt_config import load_drive
from tests.vcsd_cli.test_main import vcsd

VCSD = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]


@pytest.mark.parametrize("words", [(), ("bench",), ("drive",), ("run",), ("bench", "ftl"), ("drive", "log")])
def test_short_help_works_at_every_level(capsys, monkeypatch, words):
    code, out, err = vcsd(capsys, monkeypatch, *words, "-h")
    assert (code, err) == (0, "") and "Usage: vcsd" in out


@pytest.mark.parametrize("words", [["-h"], ["drive", "list"], ["drive", "list", "-o", "json"]])
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_closed_pipe_ends_command_silently(tmp_path, words, closed):
    reading, writing = os.pipe()
    os.close(reading)
    stderr = subprocess.STDOUT if closed == "both" else subprocess.PIPE
    environment = os.environ | {"VCSD_HOME": str(tmp_path)}
    done = subprocess.run([*VCSD, *words], stdout=writing, stderr=stderr, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr or b"") == (141, b"")


def test_error_line_into_a_closed_pipe_is_silent():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*VCSD, "no-such-command"], stderr=writing, stdout=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stdout) == (141, b"")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--policy", "reactive", "--files", "/none"], "--files /none: no such folder, file or device"),
        (["run", "--method", "nosuch"], "--method 'nosuch': the drives know dense, sparf"),
        (["run", "--policy", "nosuch"], "--policy 'nosuch': must be one of "),
        (["run", "--network", "nosuch"], "--network 'nosuch': must be one of "),
        (["run", "--transport", "nosuch"], "--transport 'nosuch': must be one of "),
        (["run", "--prompt-file=$NONE"], "--prompt-file /none: No such file or directory"),
        (["run", "--methods-file", "/none"], "--methods-file /none: no such file"),
        (["run", "--drive-config", "/none"], "--drive-config /none: No such file or directory"),
        (["run", "--data-dir", "$NOT_SET/x"], "--data-dir $NOT_SET/x: $NOT_SET is not set"),
        (["run", "--compression", "2", "--sparf-tokens", "3"], "--compression and --sparf-channels"),
        (["bench", "ftl", "--preset", "nosuch"], "--preset 'nosuch': must be one of nvmevirt-970pro"),
        (["eval", "serving", "--engine", "nosuch"], "--engine 'nosuch': must be one of a5000"),
        (["eval", "serving", "--load", "x"], "--load 'x': needs numbers with commas between them"),
    ],
)
def test_wrong_value_is_refused_before_the_model_is_loaded(capsys, monkeypatch, words, says):
    monkeypatch.setenv("NONE", "/none")
    for loader in ("vcsd.loading.load", "vcsd.generate.continue_text"):
        monkeypatch.setattr(loader, lambda *_: pytest.fail("the model is loaded"))
    code, out, err = vcsd(capsys, monkeypatch, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"vcsd: {says}")


@pytest.mark.parametrize("preset", DRIVES)
def test_preset_is_shown_as_a_description(capsys, monkeypatch, tmp_path, preset):
    code, out, _ = vcsd(capsys, monkeypatch, "config", "show", preset)
    (tmp_path / "drive.yaml").write_text(out)
    assert code == 0 and load_drive(tmp_path / "drive.yaml") == DRIVES[preset]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", str(tmp_path))
    assert vcsd(capsys, monkeypatch, "config", "validate", "$HERE/drive.yaml")[0] == 0
    assert vcsd(capsys, monkeypatch, "config", "show", "nosuch")[0] == 1


def test_json_has_each_figure_once(capsys, monkeypatch):
    words = ["run", "--prompt", "The keys. " * 20, "--max-new-tokens", "2", "--no-compare", "-o", "json"]
    code, out, _ = vcsd(capsys, monkeypatch, *words)
    result = json.loads(out)
    assert code == 0 and {"simulated_time", "kv_layout"} <= result.keys()
