"""Drives small enough to fill."""

import importlib.util
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from csd_spec import DriveSpec, Geometry
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config.guest import QEMU, find_kernel


@pytest.fixture
def small_drive() -> DriveSpec:
    """2 channels x 2 dies, 512-byte pages, 16 superblocks of 4 x 8 pages."""
    geometry = Geometry(
        channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=16, pages_per_block=8, page_bytes=512
    )
    return replace(INSTCSD_ZYNQ7045_8CH, name="small", geometry=geometry, dram_bytes=1 << 20)


@pytest.fixture
def data_dir() -> Path:
    """The folder of measuring data that VCSD_DATA names."""
    if "VCSD_DATA" not in os.environ:
        missing("data", "VCSD_DATA names no folder of measuring data")
    return Path(os.environ["VCSD_DATA"])


@pytest.fixture
def chromium() -> str:
    """A headless browser."""
    return shutil.which("chromium") or missing("chromium", "there is no chromium on the PATH")


@pytest.fixture
def own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served drives of a test are nobody else's."""
    monkeypatch.setenv("VCSD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("VCSD_HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir(mode=0o700)


@pytest.fixture
def fuse() -> None:
    """Mounts."""
    if importlib.util.find_spec("pyfuse3") is None:
        missing("fuse", "pyfuse3 is not installed: apt-get install fuse3 libfuse3-dev, then ./dev setup")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing("fuse", "/dev/fuse is not there, or not for this user")


@pytest.fixture
def guest_machine() -> None:
    """What `vcsd guest run` needs."""
    if not shutil.which(QEMU):
        missing("guest", f"{QEMU} is not installed: apt-get install qemu-system-x86")
    try:
        find_kernel()
    except FileNotFoundError as error:
        missing("guest", str(error))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what the slow tests have cost."""
    reports = [report for each in ("passed", "failed") for report in terminalreporter.stats.get(each, [])]
    slow = [report for report in reports if "slow" in report.keywords]
    if slow:
        seconds = sum(report.duration for report in slow)
        terminalreporter.write_line(f"{len(slow)} slow tests: {seconds:.0f} s of all workers together")


def missing(what: str, reason: str) -> NoReturn:
    """Skip a test for want of something, or fail it where VCSD_REQUIRE (a list with commas) names that."""
    if what in os.environ.get("VCSD_REQUIRE", "").split(","):
        pytest.fail(f"{what} is required: {reason}")
    pytest.skip(reason)
