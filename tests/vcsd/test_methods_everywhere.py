"""A user-defined method, from the documentation's file, on every transport."""

import json
import subprocess
import sys

import numpy as np
import pytest

from attention_engine import load_methods
from csd_firmware import Firmware
from csd_link.connect import find_server
from csd_link.driveset import DriveSetConfig
from csd_spec import Attend, GetLog, KvAppend, KvRead, LogPage, SeqCreate, Status
from tests.served import until
from tests.vcsd.test_docs import strided
from tests.vcsd_cli.test_main import PROMPT, vcsd
from vcsd.transport import open_drives

pytestmark = pytest.mark.usefixtures("own_run_dir")

FIGURES = ("tokens", "text", "simulated_time", "link_bytes", "flash", "drives")
METHOD = ("--method", "strided", "--compression", "4")
RUN = ("run", "--prompt", PROMPT, "--max-new-tokens", "6", *METHOD, "--no-compare", "-o", "json")


def figures(out):
    """The figures that are independent of the machine's floating-point arithmetic."""
    result = json.loads(out)
    return {key: result[key] for key in FIGURES}


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """Method file, and figures of the run in a process of its own."""
    file = strided(tmp_path_factory.mktemp("methods"))
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", *RUN, "--methods-file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return file, figures(done.stdout)


@pytest.mark.parametrize("transport", ["inproc", "process", "fuse", "window:{}/new"])
def test_documented_method_equal_on_all_transports(capsys, monkeypatch, tmp_path, request, in_process, transport):
    if transport == "fuse":
        request.getfixturevalue("fuse")
    file, expected = in_process
    words = ("--methods-file", str(file), "--transport", transport.format(tmp_path))
    code, out, err = vcsd(capsys, monkeypatch, *RUN, *words)
    assert code == 0, err
    assert figures(out) == expected
    code, _, err = vcsd(capsys, monkeypatch, *RUN, "--transport", transport.format(tmp_path))
    assert code and "'strided': the drives know dense, sparf" in err


@pytest.fixture
def operated(tmp_path, in_process):
    """Windows of drives that an operator serves, with and without the method."""
    servers, windows = [], {}
    for name, words in (("knows", ("--methods-file", str(in_process[0]))), ("plain", ())):
        config, windows[name] = tmp_path / f"{name}.yaml", tmp_path / f"{name}.window"
        config.write_text(f"drives: [{{name: {name}0}}, {{name: {name}1}}]")
        command = [
            sys.executable,
            "-c",
            "from vcsd_cli.main import main; main()",
            "drive",
            "serve",
            str(config),
            *words,
        ]
        servers.append(subprocess.Popen([*command, "--window-device", str(windows[name]), "--quiet"]))
    for name in windows:
        until(lambda name=name: find_server(f"{name}0") and find_server(f"{name}1"))
    yield windows
    for server in servers:
        server.terminate()
        server.wait()


def test_served_drives_know_methods_of_operator(capsys, monkeypatch, operated, in_process):
    file, expected = in_process
    code, out, err = vcsd(capsys, monkeypatch, *RUN, "--transport", f"window:{operated['knows']}")
    assert code == 0, err
    assert figures(out) == expected
    code, _, err = vcsd(capsys, monkeypatch, *RUN, "--transport", f"window:{operated['plain']}")
    assert code and "'strided': the drives know dense, sparf" in err
    code, _, err = vcsd(
        capsys, monkeypatch, *RUN, "--transport", f"window:{operated['plain']}", "--methods-file", str(file)
    )
    assert code and "vcsd drive serve --methods-file" in err
    _, out, _ = vcsd(capsys, monkeypatch, "drive", "log", "knows0", "programs", "-o", "json")
    assert json.loads(out)["programs"][-1]["name"] == "strided"


def test_unknown_method_refused_before_storing(small_drive, in_process):
    file, _ = in_process
    firmware, knows = Firmware(small_drive), Firmware(small_drive, methods=load_methods(file))
    rows = np.ones((20, 2, 16), np.float16)
    for each in (firmware, knows):
        seqs = tuple(each.step(SeqCreate(1, 1, 2, 16, 64), 0).data[0].tolist())
        each.step(KvAppend(seqs, 0, np.array([20]), rows, rows), 0)
    q, k, one = np.ones((1, 2, 1, 16), np.float16), rows[:1], np.array([1])
    command = Attend(seqs, 0, q, k, k, "strided", 4, 8 * one, one)
    assert knows.step(command, 0).status is Status.SUCCESS
    before = firmware.ftl.nand.writes, firmware.free_ns
    done = firmware.step(command, 0)
    assert done.status is Status.INVALID_FIELD
    assert done.reason.startswith("method = 'strided': this drive knows dense, sparf")
    assert (firmware.ftl.nand.writes, firmware.free_ns) == before
    assert firmware.step(KvRead(seqs, 0), 0).data[0].shape == (20, 2, 16)
    names = [each["name"] for each in json.loads(bytes(firmware.step(GetLog(LogPage.PROGRAMS), 0).data[0]))["programs"]]
    assert "strided" not in names


def test_method_table_is_per_drive(in_process):
    with open_drives(DriveSetConfig(methods_file=in_process[0])) as (knows,), open_drives(DriveSetConfig()) as (plain,):
        assert "strided" in knows.methods
        assert "strided" not in plain.methods


OWN_UNIT = """
from attention_engine import METHODS


def own_unit(step):
    step.compute("a unit of my own, long", "kernel", step.each, step.each)
    return METHODS["dense"](step)


METHODS["own-unit"] = own_unit
"""


@pytest.mark.parametrize("transport", ["inproc", "process"])
def test_method_with_unknown_unit_is_refused(capsys, monkeypatch, tmp_path, transport):
    (tmp_path / "own.py").write_text(OWN_UNIT)
    words = ("--methods-file", str(tmp_path / "own.py"), "--transport", transport)
    run = ("run", "--prompt", PROMPT, "--max-new-tokens", "3", "--method", "own-unit", "-o", "json")
    code, out, err = vcsd(capsys, monkeypatch, *run, *words)
    assert code and not out
    assert "method own-unit: ValueError: unit 'a unit of my own, long': must be one of network, link, queue" in err
