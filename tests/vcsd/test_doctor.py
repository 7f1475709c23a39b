"""`vcsd doctor`: the missing parts that it reports.

partner of: csd_link/diagnosis.py, vcsd_cli/doctor.py
"""

import json

import pytest

from csd_link.diagnosis import MissingDependency
from csd_link.transports import OURS
from tests.vcsd_cli.test_main import vcsd
from vcsd.doctor import examine

pytestmark = pytest.mark.usefixtures("own_run_dir")


def say(capsys, monkeypatch, *args):
    code, out, err = vcsd(capsys, monkeypatch, *args, "-o", "json")
    result = json.loads(out)
    assert (code, err) == (0 if all(way["ok"] for way in result["ways"]) else 1, "")
    return result


def test_doctor_checks_every_transport(capsys, monkeypatch):
    ways = {way["what"]: way for way in say(capsys, monkeypatch, "doctor")["ways"]}
    assert list(ways) == ["inproc", "process", "fuse", "window", "nvme+tcp", "nvme", "ray", "guest", "nvmevirt"]
    assert ways["inproc"]["ok"]
    assert all(way["ok"] or way["fix"] for way in ways.values())
    monkeypatch.setenv("PATH", "/nowhere")
    ways = {way["what"]: way for way in say(capsys, monkeypatch, "doctor")["ways"]}
    assert "apt-get install qemu-system-x86" in ways["guest"]["fix"]
    assert "apt-get install fuse3" in ways["fuse"]["fix"]


def test_doctor_reports_missing_dependency_with_fix(monkeypatch):
    monkeypatch.setattr(type(OURS[1]), "missing", lambda self: MissingDependency("it rains", "wait"))
    (result,) = (each for each in examine() if each.what == "process")
    assert (result.ok, result.found, result.fix) == (False, "it rains", "wait")


def test_doctor_text_has_install_command(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, _ = vcsd(capsys, monkeypatch, "doctor")
    assert code == 1  # something is missing
    assert "apt-get install fuse3" in out
