"""The table of transports, and a way of one's own that comes as a plug-in.

partner of: csd_link/transports/__init__.py, csd_link/transports/transport.py, csd_link/transports/inproc.py,
csd_link/transports/process.py, csd_link/transports/fuse.py, csd_link/transports/window_path.py
"""

import json

import pytest

from csd_link.driveset import DriveSet
from csd_link.transports import OURS, transport_of, transports
from tests.vcsd_cli.test_main import PROMPT, vcsd

PIGEON = '''
"""Drives that are reached by pigeon."""

from contextlib import contextmanager

from csd_link.finding import Missing
from csd_link.transports.inproc import InProcess


class Pigeon(InProcess):
    name, form = "pigeon", "pigeon:LOFT"

    def check(self, where):
        if not where:
            raise ValueError("transport = pigeon: needs a loft")

    def missing(self):
        return Missing("there is no pigeon", "buy one")
'''


@pytest.fixture
def pigeon(tmp_path, monkeypatch):
    """A package that is installed beside ours and has a transport."""
    (tmp_path / "loft.py").write_text(PIGEON)
    info = tmp_path / "loft-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loft\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vcsd.transports]\npigeon = loft:Pigeon\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    transports.cache_clear()
    yield
    transports.cache_clear()


def test_every_transport_says_what_a_user_needs():
    assert [each.name for each in OURS] == ["inproc", "process", "fuse", "window"]
    for each in OURS:
        assert each.form.startswith(each.name)
        lack = each.missing()
        assert lack is None or (lack.found and lack.fix)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pigeon", "must be one of inproc, process, fuse, window:PATH"),
        ("process:x", "nothing stands behind process"),
        ("window", "needs a path"),
        ("", "must be one of"),
    ],
)
def test_a_text_that_names_none_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        transport_of(DriveSet(transport=text))


def test_one_of_ones_own_is_a_class_and_an_entry_point(pigeon, capsys, monkeypatch):
    args = ("run", "--prompt", PROMPT, "--max-new-tokens", "2", "-o", "json")
    results = []
    for transport in ("inproc", "pigeon:home"):
        code, out, _ = vcsd(capsys, monkeypatch, *args, "--transport", transport)
        assert code == 0
        results.append(json.loads(out) | {"wall_s": 0})
    assert results[0] == results[1]
    code, _, err = vcsd(capsys, monkeypatch, *args, "--transport", "pigeon")
    assert (code, "needs a loft" in err) == (1, True)
    _, out, _ = vcsd(capsys, monkeypatch, "doctor", "-o", "json")
    ways = {way["what"]: way for way in json.loads(out)["ways"]}
    assert list(ways) == ["inproc", "process", "fuse", "window", "pigeon", "guest", "nvmevirt"]
    assert (ways["pigeon"]["ok"], ways["pigeon"]["found"], ways["pigeon"]["fix"]) == (
        False,
        "there is no pigeon",
        "buy one",
    )
