"""Block traces: recorded, replayed, and malformed ones.

partner of: vcsd_cli/trace.py
"""

import json

import pytest

from csd_spec import DeviceError
from csd_spec.presets import NVMEVIRT_970PRO
from eval.bench.block_trace import load_trace, record, replay
from tests.vcsd_cli.test_main import vcsd


def test_what_a_drive_refuses_leaves_no_trace(tmp_path):
    with pytest.raises(DeviceError, match="'zz': this drive knows"):
        record(tmp_path / "trace", 300, 4, "zz", 8)
    assert not (tmp_path / "trace").exists()


def test_a_recorded_trace_replays(tmp_path):
    done = record(tmp_path / "trace", 300, 4, "sparf", 8)
    requests = load_trace(tmp_path / "trace")
    result = replay(requests, NVMEVIRT_970PRO)
    assert result["requests"] == done["requests"] == len(requests)
    assert 0 < result["reads"] < len(requests)
    assert result["mean_latency_us"] > 4


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1 0 0 8 1\n1 0 x 8 1", 2),
        ("1 0 0 8", 1),
        ("1 0 0 0 1", 1),
        ("1 0 0 8 7", 1),
        (f"{10**23} 0 0 8 1", 1),
        (f"0 {9**99} 0 8 1", 1),
    ],
)
def test_malformed_block_traces_name_the_line(tmp_path, text, line):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ValueError, match=f"line {line}"):
        load_trace(tmp_path / "trace")


def test_the_command_line_records_and_replays(capsys, monkeypatch, tmp_path):
    words = ("trace", "record", str(tmp_path / "trace"), "--tokens", "100", "--steps", "1", "-o", "json")
    code, out, _ = vcsd(capsys, monkeypatch, *words)
    assert (code, json.loads(out)["requests"]) == (0, len(load_trace(tmp_path / "trace")))
    code, out, _ = vcsd(capsys, monkeypatch, "trace", "replay", str(tmp_path / "trace"), "-o", "json")
    assert (code, json.loads(out)["preset"]) == (0, "nvmevirt-970pro")
    code, _, err = vcsd(capsys, monkeypatch, *words, "--attention", "zz")
    assert (code, "'zz'" in err) == (1, True)
