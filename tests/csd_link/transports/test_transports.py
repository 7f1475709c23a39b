"""The table of transports, and a custom transport from a plug-in.

partner of: csd_link/transports/__init__.py, csd_link/transports/transport.py, csd_link/transports/inproc.py,
csd_link/transports/process.py, csd_link/transports/fuse.py, csd_link/transports/window_path.py,
csd_link/transports/nvme_tcp.py
"""

import json
import os
import random
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from csd_firmware.folder import DriveFolder
from csd_link.driveset import TRANSPORTS, DriveSetConfig
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.listen import Listen, nqn_of
from csd_link.recovery import RecoveringDrive
from csd_link.run_dir import port_path, run_dir
from csd_link.transports import OURS, transport_of, transports
from csd_link.transports.fuse import Fuse
from csd_link.transports.transport import check_served
from csd_spec import LogPage
from tests.certificates import certificates
from tests.served import decoder, free_port, serving
from tests.vcsd_cli.test_main import PROMPT, vcsd
from vcsd.administer import admin_window, read_log
from vcsd.drive_report import DriveReport
from vcsd.transport import open_drives
from vcsd_eval.verify.faulty_proxy import FaultyProxy

PIGEON = '''
"""Drives that are reached by pigeon."""

import os
from contextlib import contextmanager

from csd_link.diagnosis import MissingDependency
from csd_link.transports.fuse import Fuse
from csd_link.transports.inproc import InProcess


class Pigeon(InProcess):
    name, form = "pigeon", "pigeon:LOFT"

    def check(self, where):
        if not where:
            raise ValueError("transport = pigeon: needs a loft")

    def missing(self):
        return None if "PIGEON" in os.environ else MissingDependency("there is no pigeon", "buy one")
'''


@pytest.fixture
def pigeon(tmp_path, monkeypatch):
    """An installed third-party package that has a transport."""
    (tmp_path / "loft.py").write_text(PIGEON)
    info = tmp_path / "loft-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loft\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vcsd.transports]\npigeon = loft:Pigeon\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    transports.cache_clear()
    yield
    transports.cache_clear()


def test_every_transport_describes_form_and_needs():
    assert [transport.name for transport in OURS] == ["inproc", "process", "fuse", "window", "nvme+tcp", "nvme", "ray"]
    for transport in OURS:
        assert transport.form.startswith(transport.name)
        lack = transport.missing()
        assert lack is None or (lack.found and lack.fix)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pigeon", "must be one of inproc, process, fuse, window:PATH"),
        ("process:x", "process takes no argument"),
        ("window", "needs a path"),
        ("", "must be one of"),
        ("nvme+tcp:127.0.0.1:4420", "needs an address"),
        ("nvme+tcp://", "needs an address"),
        ("nvme+tcp:///nqn", "needs an address"),
        ("nvme+tcp://127.0.0.1:0", "needs an address"),
        ("nvme+tcp://127.0.0.1:4420?hostnqn=", r"\?hostnqn=: must be one of hostnqn, ctrl_loss_tmo, "),
        ("nvme+tcp://127.0.0.1:4420/nqn?host=nqn", r"\?host=nqn: must be one of"),
        ("nvme+tcp://127.0.0.1?hostnqn=a&hostnqn=b", r"\?hostnqn=b: .* each once"),
        (f"nvme+tcp://127.0.0.1?hostnqn={'n' * 224}", "at most 223 bytes"),
        ("nvme+tcp://127.0.0.1:4420?ctrl_loss_tmo=-1", "must be whole seconds, 0 to 86400"),
        ("nvme+tcp://127.0.0.1?cert=a.pem", "no effect without tls=FILE"),
        ("nvme+tcp://127.0.0.1?tls=/no.pem", "TLS file /no.pem: No such file or directory"),
        ("nvme+tcp://127.0.0.1:65536/nqn", "needs an address"),
    ],
)
def test_unknown_transport_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        transport_of(DriveSetConfig(transport=text))


def test_custom_transport_is_class_and_entry_point(pigeon, capsys, monkeypatch):
    args = ("run", "--prompt", PROMPT, "--max-new-tokens", "2", "--no-compare", "-o", "json")
    results = []
    code, _, err = vcsd(capsys, monkeypatch, *args, "--transport", "pigeon:home")
    assert code and "there is no pigeon: buy one" in err
    monkeypatch.setenv("PIGEON", "1")
    for transport in ("inproc", "pigeon:home"):
        code, out, _ = vcsd(capsys, monkeypatch, *args, "--transport", transport)
        assert code == 0
        results.append(json.loads(out) | {"wall_s": 0})
    assert results[0] == results[1]
    code, _, err = vcsd(capsys, monkeypatch, *args, "--transport", "pigeon")
    assert code and "needs a loft" in err
    monkeypatch.delenv("PIGEON")
    _, out, _ = vcsd(capsys, monkeypatch, "doctor", "-o", "json")
    ways = {way["what"]: way for way in json.loads(out)["ways"]}
    assert list(ways) == [
        "inproc",
        "process",
        "fuse",
        "window",
        "nvme+tcp",
        "nvme",
        "ray",
        "pigeon",
        "guest",
        "nvmevirt",
    ]
    assert (ways["pigeon"]["ok"], ways["pigeon"]["found"], ways["pigeon"]["fix"]) == (
        False,
        "there is no pigeon",
        "buy one",
    )


@pytest.mark.usefixtures("own_run_dir")
@pytest.mark.parametrize("stalled_s", [1.5, 4.0])
@pytest.mark.parametrize("transport", ["process", "fuse", "window:{}/windows", "nvme+tcp"])
def test_simulated_time_ignores_stopped_process(transport, stalled_s, tmp_path, request):
    if transport == "fuse":
        request.getfixturevalue("fuse")

    def decode(name, stall):
        with open_drives(DriveSetConfig(count=2, transport=name)) as devices:
            driver, batch, step = decoder(devices, flush_interval_steps=3)
            outputs = []
            for number in range(6):
                if number == 2:
                    stall()
                outputs.append(step())
            driver.free(batch)
            return np.stack(outputs), DriveReport.of(driver).to_dict(), driver.now_ns

    def stall():
        pids = [int(file.read_text()) for file in run_dir().glob("*/pid")]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            Timer(stalled_s, os.kill, (pid, signal.SIGCONT)).start()

    expected, *figures = decode("inproc", lambda: None)
    undisturbed, *stalled = decode(transport.format(tmp_path), stall)
    np.testing.assert_array_equal(undisturbed, expected)
    assert stalled == figures


@pytest.mark.usefixtures("own_run_dir", "fuse")
def test_mounted_drive_killed_in_decode_and_at_end(tmp_path):
    def pid():
        return int(next(run_dir().glob("*/pid")).read_text())

    with open_drives(DriveSetConfig()) as devices:
        _, _, step = decoder(devices)
        expected = [step() for _ in range(12)]
    with open_drives(DriveSetConfig(transport="fuse", data_dir=tmp_path / "kept")) as devices:
        _, _, step = decoder(devices, flush_interval_steps=2)
        for number, output in enumerate(expected):
            if number % 4 == 1:
                os.kill(pid(), signal.SIGKILL)
            np.testing.assert_array_equal(step(), output)
        os.kill(pid(), signal.SIGKILL)
    assert str(run_dir()) not in Path("/proc/self/mounts").read_text()
    assert not list(run_dir().glob("run-*"))


@pytest.mark.usefixtures("own_run_dir")
def test_served_drives_decode_equal_by_address(tmp_path, capsys, monkeypatch):
    port = free_port(2)
    listen = Listen("127.0.0.1", port, ("csd0", "csd1"))
    args = (
        "run",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "4",
        "--drives",
        "2",
        "--no-compare",
        "-o",
        "json",
        "--transport",
    )

    def run(transport):
        code, out, err = vcsd(capsys, monkeypatch, *args, transport)
        return json.loads(out) | {"wall_s": 0} if not code else err

    address = f"nvme+tcp://127.0.0.1:{port}"
    assert "no drive answers" in (said := run(address)) and f"vcsd drive serve --listen 127.0.0.1:{port}" in said
    expected = run("inproc")
    with serving(tmp_path, "csd0", "csd1", listen=listen):
        assert run(address) == expected
        assert "1 drives are served" in run(f"{address}/{nqn_of('csd1')}")
        assert f"no drive nqn at 127.0.0.1:{port}: there are {nqn_of('csd0')}" in run(f"{address}/nqn")
    assert run("nvme+tcp") == expected
    files = certificates(tmp_path / "tls", "nqn.host:1")
    options = "hostnqn=nqn.host:1&tls={0.ca}&cert={0.cert}&key={0.key}".format(files["named"])
    with serving(tmp_path, "csd0", "csd1", listen=replace(listen, tls=files["drive"])):
        assert run(f"{address}?{options}") == expected
        said = run(address)
        assert "add ?tls=FILE" in said and said.count("\n") == 1
        said = run(f"{address}?tls={files['impostor'].cert}")
        assert f"no drive at 127.0.0.1:{port}: the peer's certificate is refused" in said and said.count("\n") == 1
        assert run(f"{address}?{options.replace('nqn.host', 'nqn.other')}").count("\n") == 1
        device = admin_window("csd0")
        assert read_log(device, LogPage.SMART)["hosts_refused"] == 3
        device.close()


@pytest.mark.usefixtures("own_run_dir")
def test_decode_continues_if_nvme_tcp_drives_are_killed(tmp_path):
    with open_drives(DriveSetConfig()) as devices:
        _, _, step = decoder(devices)
        expected = [step() for _ in range(12)]
    with open_drives(DriveSetConfig(transport="nvme+tcp", data_dir=tmp_path / "kept")) as devices:
        _, _, step = decoder(devices, flush_interval_steps=2)
        for number, output in enumerate(expected):
            if number % 4 == 1:
                os.kill(int(next(run_dir().glob("*/pid")).read_text()), signal.SIGKILL)
            np.testing.assert_array_equal(step(), output)
        assert len(devices[0].recoveries) == 3


@pytest.mark.usefixtures("own_run_dir")
def test_cut_connections_in_decode_change_no_result(tmp_path):
    with open_drives(DriveSetConfig()) as devices:
        driver, _, step = decoder(devices)
        expected = [step() for _ in range(60)]
        figures = DriveReport.of(driver).to_dict(), driver.now_ns
    with serving(tmp_path, "csd0", listen=Listen("127.0.0.1", 0, ("csd0",))):
        proxy = FaultyProxy(int(port_path("csd0").read_text()), random.Random(0), 30_000, ("cut",))
        device = RecoveringDrive(lambda: NvmeDrive(lambda: Endpoint("127.0.0.1", proxy.port, nqn_of("csd0"))))
        proxy.is_active = True
        driver, _, step = decoder([device])
        np.testing.assert_array_equal([step() for _ in expected], expected)
        assert (DriveReport.of(driver).to_dict(), driver.now_ns) == figures
        assert proxy.count > 5 and not device.recoveries
        proxy.is_active = False
        device.close()
        proxy.close()


@pytest.mark.parametrize(
    ("absent", "found"),
    [
        ("", ""),
        ("fusermount3", "fusermount3 is missing"),
        ("pyfuse3", "pyfuse3 is missing"),
        ("device", "/dev/fuse is missing"),
        ("access", "/dev/fuse is not accessible to this user"),
    ],
)
def test_what_a_mount_lacks_is_named(monkeypatch, absent, found):
    monkeypatch.setattr("shutil.which", lambda name: None if absent == name else f"/usr/bin/{name}")
    monkeypatch.setattr("csd_link.transports.fuse.is_installed", lambda package: absent != package)
    monkeypatch.setattr("os.path.exists", lambda path: absent != "device")
    monkeypatch.setattr("os.access", lambda path, mode: absent != "access")
    lack = Fuse().missing()
    assert (lack.found if lack else "") == found


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (DriveSetConfig(), ""),
        (
            DriveSetConfig(methods_file=Path(__file__)),
            "methods = .*: the drives at home are already served",
        ),
        (
            DriveSetConfig(threads=3),
            "durability, medium and threads of the drives at home are set by their operator",
        ),
    ],
)
def test_served_drives_take_no_options_of_their_operator(setting, said):
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        check_served(setting, "home")


def test_drives_in_this_process_are_closed_after_the_block(tmp_path):
    with open_drives(DriveSetConfig(count=2, data_dir=tmp_path)) as drives:
        assert [drive.spec for drive in drives] == [DriveSetConfig().spec] * 2
        with pytest.raises(ValueError, match="process"):
            DriveFolder(drives[0].spec, tmp_path / "drive0")
    DriveFolder(drives[0].spec, tmp_path / "drive0").close()


def test_help_of_the_option_names_every_transport():
    assert {form.partition(":")[0] for form in TRANSPORTS.split(", ")} == {transport.name for transport in OURS}
