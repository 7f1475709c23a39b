"""Drives small enough to fill, tools that a test needs, profiles of property tests and the account of durations."""

import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import settings

from csd_spec import DriveSpec, Geometry
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config.guest import QEMU, find_kernel
from tests.properties import RANDOM, RANDOM_EXAMPLES
from vcsd.models import find_model

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `vcsd run`; PyTorch reads it when it is imported
LONGEST = 10  # tests that the account of durations lists
DURATIONS = Path(__file__).with_name("durations.json")
QUICK_S = 80.0  # seconds of all workers together that tests of --quick take
PHASES = "setup", "call", "teardown"
collect_ignore = ["real"]  # only when named: ./dev test --real

settings.register_profile(RANDOM, settings.get_profile("ci"), derandomize=False, max_examples=RANDOM_EXAMPLES)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a quick run."""
    parser.addoption("--long", action="store_true", help="run the tests that are marked long too")
    parser.addoption("--quick", action="store_true", help=f"run the files that take least, {QUICK_S:g} s together")
    parser.addoption("--record-durations", action="store_true", help=f"write those of this run to {DURATIONS.name}")


@pytest.hookimpl(trylast=True)  # after those that mark tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of a quick run: whole files with the shortest recorded durations. Leave long tests out."""
    if not config.getoption("--long"):
        _keep(config, items, lambda item: item.get_closest_marker("long") is None)
    if config.getoption("--quick"):
        seconds = json.loads(DURATIONS.read_text())
        chosen = quick_tests([function_of(item.nodeid) for item in items], seconds)
        _keep(config, items, lambda item: function_of(item.nodeid) in chosen)


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]


def function_of(nodeid: str) -> str:
    """A test's file and function, without its parameters."""
    return nodeid.partition("[")[0]


def quick_tests(tests: Iterable[str], seconds: Mapping[str, float], limit_s: float = QUICK_S) -> set[str]:
    """Tests of the files that take least, up to a sum. Files are whole, since their tests share fixtures.

    Args:
        tests: Functions, as `FILE::NAME`; a new one takes no time.
        seconds: Recorded duration of a function, with all of its parameters and fixtures.
        limit_s: Sum of the recorded durations, seconds.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for test in set(tests):
        files[test.partition("::")[0]].append(test)
    chosen, total = set[str](), 0.0
    sums = {file: sum(seconds.get(test, 0.0) for test in tests) for file, tests in files.items()}
    for file in sorted(files, key=lambda file: (sums[file], file)):
        total += sums[file]
        if total > limit_s:
            break
        chosen.update(files[file])
    return chosen


def pytest_configure(config: pytest.Config) -> None:
    """Use the same examples in each run unless `--hypothesis-profile` selects another profile.

    Make Ctrl-C interrupt even if a shell that runs commands in the background has set it to be ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators: data of a test depends neither on other tests nor on its worker."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


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
def smollm2() -> Path:
    """The folder of SmolLM2-135M."""
    try:
        return find_model(Path("smollm2"))
    except ValueError as error:
        missing("model", str(error))


@pytest.fixture
def chromium() -> str:
    """A headless browser."""
    return shutil.which("chromium") or missing("chromium", "there is no chromium on the PATH")


@pytest.fixture
def own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the served drives of a test apart from all others."""
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


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray, for a test that starts a cluster on this machine and stops it."""
    if importlib.util.find_spec("ray") is None:
        missing("ray", "Ray is not installed: ./dev setup")
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)  # pytest's own paths are too long for Ray's sockets
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield
        assert not ray.is_initialized(), "the test has not stopped its cluster"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the longest tests by phase, and the sum of the slow ones; fixtures count."""
    phases: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    slow = set()
    for report in (entry for reports in terminalreporter.stats.values() for entry in reports):
        if getattr(report, "when", None) in PHASES:
            phases[report.nodeid][report.when] += report.duration
            if "slow" in report.keywords:
                slow.add(report.nodeid)
    seconds = {test: sum(durations.values()) for test, durations in phases.items()}
    if terminalreporter.config.getoption("--record-durations"):
        _record(seconds)
    if seconds:
        terminalreporter.section(f"{LONGEST} longest tests: seconds in {', '.join(PHASES)}")
    for test in sorted(seconds, key=lambda test: -seconds[test])[:LONGEST]:
        parts = " ".join(f"{phases[test][phase]:6.1f}" for phase in PHASES)
        terminalreporter.write_line(f"{seconds[test]:7.1f} = {parts}  {test}")
    if slow:
        total = sum(seconds[test] for test in slow)
        terminalreporter.write_line(f"{len(slow)} slow tests: {total:.0f} s of all workers together")


def _record(seconds: Mapping[str, float]) -> None:
    """Write the durations of test functions; those that did not run keep theirs."""
    taken: dict[str, float] = defaultdict(float)
    for nodeid, duration in seconds.items():
        taken[function_of(nodeid)] += duration
    durations = json.loads(DURATIONS.read_text()) | {test: round(taken[test], 2) for test in taken}
    DURATIONS.write_text(json.dumps(durations, indent=0, sort_keys=True) + "\n")


def missing(what: str, reason: str) -> NoReturn:
    """Skip a test for want of something, or fail it where VCSD_REQUIRE (a list with commas) names that."""
    if what in os.environ.get("VCSD_REQUIRE", "").split(","):
        pytest.fail(f"{what} is required: {reason}")
    pytest.skip(reason)
