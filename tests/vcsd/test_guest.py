"""A guest VM finds the drive: its NVMe driver and our host driver in the guest, the firmware outside.

partner of: vcsd_cli/guest.py, nvmevirt_config/guest.py, host_driver/in_guest.py, host_driver/random_decode.py
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from csd_link.driveset import DriveSetConfig
from csd_spec import AttentionConfig, CompressionBudget
from host_driver.driver import Driver
from host_driver.in_guest import arguments
from host_driver.passthrough import Layers
from host_driver.random_decode import SHIPPED_SHAPE, random_decode
from nvmevirt_config.guest import Guest
from nvmevirt_config.module import Reservation
from vcsd.guest import GuestDecodeTest
from vcsd.loading import CHECKPOINT
from vcsd.loading import load as load_model
from vcsd.transport import open_drives
from vcsd_eval.accuracy.recorded import TEXT, record


def record_layers(file):
    """q of the last token, k and v of every layer of the shipped model on two texts."""
    model, tokenizer = load_model(CHECKPOINT)
    ids = torch.tensor(tokenizer(TEXT.read_text())["input_ids"])
    found = record(model, torch.stack([ids[:1024], ids[1024:2048]]))
    k, v = (
        np.stack([np.concatenate(heads).transpose(1, 0, 2) for heads in of_layers])  # (S, B H, d) of each
        for of_layers in ([each.k for each in found], [each.v for each in found])
    )
    q = np.stack([each.q[:, :, -1].reshape(k.shape[2], -1, k.shape[3]) for each in found])
    Layers(q, k, v).save(file)


@pytest.mark.slow
@pytest.mark.usefixtures("guest_machine")
def test_guest_decode_over_window_equals_in_process(tmp_path):
    record_layers(tmp_path / "layers.npz")
    words = ["guest", "run", "--drives", "1", "--prompt-tokens", "3000", "--tokens", "64", "-o", "json"]
    words += ["--layers-file", str(tmp_path / "layers.npz")]
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", *words]
    console = tmp_path / "console"
    done = subprocess.run([*command, "--console", str(console)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["differ"] == []
    assert (result["tokens"], result["decoded_over"]) == (64, ["ng0n1", "nvme0n1"])
    assert (result["id_ctrl"]["sn"], result["id_ctrl"]["vid"]) == ("vcsd", 0x1B36)
    assert result["id_ctrl"]["mn"].startswith("QEMU NVMe Ctrl")
    passed = result["passthrough"]
    assert (passed["namespace"], passed["how"]) == ("ng0n2", "io_uring, registered buffers")
    assert (passed["requests"], passed["request_bytes"], passed["depth"]) == (32, 256 << 10, 32)
    assert passed["bytes_equal"] and passed["output_equal"] and passed["deallocated"]
    answer = [line for line in console.read_text().splitlines() if line.startswith("vcsd-guest: ")]
    assert len(json.loads(answer[0].removeprefix("vcsd-guest: "))["decodes"]["nvme0n1"]["outputs"]) == 64


def test_missing_guest_module_is_refused():
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
    assert done.returncode and not done.stdout
    assert "/nowhere.ko" in done.stderr


def test_kernel_command_line_reaches_init(tmp_path):
    module = tmp_path / "nvmev.ko"
    module.write_bytes(b"")
    reservation = Reservation()
    for run, model in (
        (GuestDecodeTest(drives=DriveSetConfig(count=3), prompt=5, tokens=7), "QEMU"),
        (GuestDecodeTest(drives=DriveSetConfig(count=3), prompt=5, tokens=7, module=module), "CSL_Virt"),
    ):
        said = arguments(" ".join(("quiet", *run.words(reservation), "ro")))
        assert {"drives": "3", "prompt": "5", "tokens": "7", "model": model}.items() <= said.items()
        options = said.get("module", "").replace("/", " ").split()
        assert options == (list(reservation.module_options) if run.module else [])


def test_guest_time_limit_grows_with_work():
    small, large = (
        GuestDecodeTest(drives=DriveSetConfig(count=drives), prompt=5, tokens=500).limit_s(240) for drives in (1, 4)
    )
    assert 240 < small < large < GuestDecodeTest(drives=DriveSetConfig(count=4), prompt=5000, tokens=500).limit_s(240)
    assert GuestDecodeTest(drives=DriveSetConfig(count=4), prompt=5, tokens=500, timeout_s=7).limit_s(240) == 7


@pytest.mark.slow
@pytest.mark.usefixtures("guest_machine")
def test_guest_with_module_finds_root_device(tmp_path):
    (tmp_path / "nvmev.ko").write_bytes(b"no module")
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", "guest", "run", "--module"]
    done = subprocess.run([*command, str(tmp_path / "nvmev.ko")], capture_output=True, text=True, check=False)
    assert done.returncode and not done.stdout
    assert "module.ko" in done.stderr  # the first program ran, and could not insert it


@pytest.mark.parametrize("drive", [None, Path("drive.raw")])
def test_guest_command_has_root_memory_and_drive(drive):
    guest = Guest(
        kernel=Path("kernel"),
        root=Path("root"),
        memory=Path("ram"),
        drive=drive,
        scratch=drive and Path("scratch"),
        kernel_args=("vcsd.drives=2",),
        reservation=Reservation(),
    )
    command = guest.command("tcg")
    line = command[command.index("-append") + 1]
    assert Reservation().kernel_argument in line
    assert "vcsd.drives=2" in line
    disks = [word for word in command if word.startswith("file=")]
    files = ["file=drive.raw", "file=scratch", "file=root"] if drive else ["file=root"]
    assert [disk.partition(",")[0] for disk in disks] == files
    assert disks[-1].endswith("readonly=on")
    assert [disk.endswith("discard=unmap") for disk in disks] == [file == "file=scratch" for file in files]
    assert [f"nsid={number}," in " ".join(command) for number in (1, 3)] == [True, bool(drive)]
    assert f"root=/dev/nvme0n{len(disks)} " in line  # Linux counts the namespaces that are there
    assert f"size={Reservation().end_bytes}" in " ".join(command)


def test_random_data_and_cost_are_deterministic():
    results = []
    for _ in range(2):
        with open_drives(DriveSetConfig(count=2)) as devices:
            driver = Driver(devices, SHIPPED_SHAPE, AttentionConfig("sparf", CompressionBudget(8)))
            results.append(random_decode(driver, 40, 3))
            driver.close()
    assert results[0] == results[1]
    assert {len(values) for values in results[0].values()} == {3}
    assert len(set(results[0]["outputs"])) == 3
