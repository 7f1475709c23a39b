"""The command line, called by a program, and with a user's mistakes.

partner of: vcsd_cli/shared.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.served import HANG_S, until
from vcsd_cli import main as cli

PROMPT = "The keys and values are stored in pages. " * 20


def vcsd(capsys, monkeypatch, *args):
    """Exit code, stdout and stderr of a command, in this process."""
    monkeypatch.setattr(sys, "argv", ["vcsd", *args])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_main_help_imports_no_torch():
    code = "import sys; sys.modules['torch'] = None; from vcsd_cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "run", "--help"], capture_output=True, text=True, check=True)
    assert "--compression" in done.stdout


def test_drives_in_data_dir_have_logs(capsys, monkeypatch, tmp_path):
    vcsd(
        capsys,
        monkeypatch,
        "run",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "4",
        "--no-compare",
        "--data-dir",
        str(tmp_path),
        "-o",
        "json",
    )
    code, out, _ = vcsd(capsys, monkeypatch, "drive", "log", str(tmp_path / "drive1"), "wear", "-o", "json")
    assert code == 0
    assert json.loads(out)["pages_groups"] > 0
    code, out, _ = vcsd(capsys, monkeypatch, "drive", "log", str(tmp_path / "drive0"), "smart", "-o", "json")
    assert code == 0
    assert json.loads(out)["data_units_written"] > 0
    for source, target in (("drive0", "snapshot"), ("snapshot", "restored")):
        code, _, _ = vcsd(capsys, monkeypatch, "drive", "copy", str(tmp_path / source), str(tmp_path / target))
        assert code == 0
    _, again, _ = vcsd(capsys, monkeypatch, "drive", "log", str(tmp_path / "restored"), "smart", "-o", "json")
    assert json.loads(again)["data_units_written"] == json.loads(out)["data_units_written"]


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        (
            ["--workload", "randread", "--requests", "1000"],
            {"iops", "mean_latency_us", "p99_latency_us", "simulated_s"},
        ),
        (["--requests", "3", "--capacity-gb", "4"], {"pages_per_wall_s", "map_bytes_per_page", "peak_rss_bytes"}),
        (["--workload", "churn", "--target-pe-cycles", "0.2"], {"waf", "erase_max", "erase_min", "erase_mean"}),
    ],
)
def test_bench_ftl_prints_its_keys(capsys, monkeypatch, args, keys):
    code, out, _ = vcsd(capsys, monkeypatch, "bench", "ftl", *args, "-o", "json")
    assert code == 0
    assert keys <= set(json.loads(out))


def test_power_loss_prints_its_keys(capsys, monkeypatch):
    code, out, _ = vcsd(capsys, monkeypatch, "verify", "power-loss", "--count", "100", "-o", "json")
    result = json.loads(out)
    assert (code, result["lost"], result["wrong"]) == (0, 0, 0)
    assert result["recovered"] == result["cuts"] >= 100


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["drive", "log", "/nowhere", "smart"], "no drive in /nowhere"),
        (["drive", "copy", "/nowhere", "/tmp/x"], "no drive in /nowhere"),
        (["drive", "replay", "/nowhere"], "/nowhere"),
        (["bench", "ftl", "--workload", "randread", "--preset", "x"], "--preset 'x'"),
        (["bench", "ftl", "--workload", "randread", "--block-bytes", "100"], "--block-bytes"),
        (["bench", "ftl", "--workload", "churn", "--trace", "/nowhere"], "/nowhere"),
        (["bench", "ftl", "--iodepth", "0"], "--iodepth"),
        (["bench", "decode", "--tokens", "5000"], "--tokens 5000"),
        (["bench", "nothing"], "nothing"),
    ],
)
def test_invalid_input_is_one_line_error(capsys, monkeypatch, args, reason):
    code, out, err = vcsd(capsys, monkeypatch, *args)
    assert (code != 0, out) == (True, "")
    assert len(err.strip().splitlines()) == 1
    assert reason in err


@pytest.mark.parametrize(
    "words", [["verify", "bit-flips"], ["verify", "power-loss"], ["verify", "exceptions"], ["run"]]
)
def test_ctrl_c_is_one_line_and_exit_130(words, tmp_path):
    """Workers went on, and a compiled call made a page of errors of it."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; from vcsd_cli.main import main; print('begins', flush=True); main()"
    command = [sys.executable, "-c", code, *words]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until(lambda: "begins" in (tmp_path / "out").read_text())
        time.sleep(5)  # wherever it is then
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
    lines = [line for line in said.splitlines() if " of " not in line and ", " not in line]
    assert (process.returncode, lines) == (130, ["vcsd: interrupted"]), said
    until(lambda: not _group(process.pid))


def _group(pgid):
    """Processes of a group that have not ended."""
    result = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(group) == pgid and state != "Z":
                result.append(stat.parent.name)
    return result
