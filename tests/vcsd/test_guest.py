"""A Linux of its own finds the drive: its NVMe driver, our host driver, the firmware outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("guest_machine")
def test_the_guest_decodes_over_the_window_as_in_process(tmp_path):
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", "guest", "run", "-o", "json"]
    console = tmp_path / "console"
    done = subprocess.run([*command, "--console", str(console)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"]
    assert (result["tokens"], result["decoded_over"]) == (16, ["ng0n1", "nvme0n1"])
    assert (result["id_ctrl"]["sn"], result["id_ctrl"]["vid"]) == ("vcsd", 0x1B36)
    assert result["id_ctrl"]["mn"].startswith("QEMU NVMe Ctrl")
    answer = [line for line in console.read_text().splitlines() if line.startswith("vcsd-guest: ")]
    assert len(json.loads(answer[0].removeprefix("vcsd-guest: "))["decodes"]["nvme0n1"]["outputs"]) == 16


def test_a_module_that_is_none_is_refused():
    command = [
        sys.executable,
        "-c",
        "from vcsd_cli.main import main; main()",
        "guest",
        "run",
        "--module",
        "/nowhere.ko",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "/nowhere.ko" in done.stderr
    assert Path("/nowhere.ko").exists() is False
