"""A guest VM connects to drives by NVMe/TCP: nvme-cli, a file system, a decode over its nodes.

partner of: host_driver/in_guest.py, vcsd/guest_fabric.py, host_driver/in_guest_fabric.py,
host_driver/in_guest_tools.py, csd_io/passthrough.py
"""

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from csd_io.passthrough import Passthrough
from host_driver.in_guest import _insert
from nvmevirt_config.guest import kernel_modules
from tests.conftest import missing
from vcsd.guest_fabric import PROGRAMS, _listen, _program

VCSD = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]


@pytest.mark.slow
@pytest.mark.usefixtures("guest_machine")
def test_guest_decode_over_nvme_tcp_equals_in_process():
    if not shutil.which("nvme"):
        missing("guest", "nvme-cli is not installed: apt-get install nvme-cli")
    words = ["guest", "run", "--fabric", "tcp", "--drives", "2", "-o", "json"]
    words += ["--prompt-tokens", "300", "--tokens", "8"]
    done = subprocess.run([*VCSD, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"] and result["differ"] == []
    assert len(result["discovered"]) == 2 and result["id_ctrl"]["subnqn"] == result["discovered"][0]
    assert (result["decoded_over"], result["how"]) == (["ng1n3", "ng2n3"], "io_uring")
    assert result["values_equal"]
    fio = {key: count for key, count in result["fio"].items() if key.startswith(("randwrite", "randread", "error"))}
    assert fio == {"randwrite_writes": 1024, "randwrite_reads": 1024, "randread_writes": 0, "randread_reads": 1024} | {
        "error": 0
    }
    for paths in result["paths"].values():  # of one host, and of two
        counts = [(fio["randwrite_reads"], fio["error"]) for fio in (paths["both"], paths["alone"])]
        assert (paths["controllers"], counts) == (2, [(1024, 0)] * 2)
    assert result["paths"].keys() == {"same_host", "other_host"}
    assert result["commands"]["id_ns"] == {"nsze": 1 << 20, "ncap": 1 << 20, "nuse": 0}
    errors = result["commands"]["errors"]
    assert errors["smart_log"] == errors["error_log"] >= 3
    for each in result["filesystem"]:
        assert each["bytes_equal"] and each["fsck_clean"] and each["nuse_trimmed"] < each["nuse_with_file"]


def test_modules_load_after_their_dependencies(tmp_path, monkeypatch):
    folder = tmp_path / "6.1.0"
    folder.mkdir()
    (folder / "modules.dep").write_text("net/card.ko: net/net.ko bus/bus.ko\nnet/net.ko: bus/bus.ko\nbus/bus.ko:\n")
    monkeypatch.setattr("nvmevirt_config.guest.MODULES", tmp_path)
    kernel = Path("/boot/vmlinuz-6.1.0")
    expected = [folder / each for each in ("bus/bus.ko", "net/net.ko", "net/card.ko")]
    assert kernel_modules(kernel, ["card"]) == kernel_modules(kernel, ["net", "card", "bus"]) == expected
    with pytest.raises(FileNotFoundError, match=r"has no disk.ko: apt-get install"):
        kernel_modules(kernel, ["disk"])
    with pytest.raises(FileNotFoundError, match=r"has no card.ko: apt-get install"):
        kernel_modules(Path("/boot/vmlinuz-9"), ["card"])


def test_missing_guest_program_is_one_line_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert set(PROGRAMS.values()) >= {"nvme-cli", "e2fsprogs"}
    with pytest.raises(FileNotFoundError, match="no-such-program is missing: apt-get install nvme-cli"):
        _program("no-such-program", "nvme-cli")
    done = subprocess.run(
        [*VCSD, "guest", "run", "--fabric", "tcp", "--module", __file__], capture_output=True, text=True
    )
    assert done.returncode == 1 and "remove --module and --layers-file" in done.stderr


def test_guest_drives_listen_on_consecutive_ports():
    listen = _listen(("a", "b", "c"))
    assert [listen.port_of(name) - listen.port for name in "abc"] == [0, 1, 2]
    assert [record.port for record in listen.records] == [listen.port + number for number in range(3)]


def test_opening_non_namespace_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", Path("/dev/null")):
        with pytest.raises(OSError, match="is not an NVMe namespace"):
            Passthrough(path)


def test_loading_invalid_module_is_an_error(tmp_path):
    (tmp_path / "none.ko").write_bytes(b"no module")
    with pytest.raises(OSError, match=r"none.ko a=1: "):
        _insert(ctypes.CDLL(None, use_errno=True), tmp_path / "none.ko", "a=1")
