"""Block traces: recorded, replayed, and malformed ones.

partner of: vcsd_cli/block_trace.py, eval/bench/_trace_lines.py
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_spec import DriveError
from csd_spec.presets import NVMEVIRT_970PRO
from tests.properties import examples
from tests.vcsd_cli.test_main import vcsd
from vcsd_eval.baselines.conventional import ConventionalSsd
from vcsd_eval.bench.block_trace import load_trace, record, replay


def test_refused_recording_leaves_no_file(tmp_path):
    with pytest.raises(DriveError, match="'zz': this drive knows"):
        record(tmp_path / "trace", 300, 4, "zz", 8)
    assert not (tmp_path / "trace").exists()


def test_a_recorded_trace_replays(tmp_path):
    done = record(tmp_path / "trace", 300, 4, "sparf", 8)
    requests = load_trace(tmp_path / "trace")
    result = replay(requests, ConventionalSsd(NVMEVIRT_970PRO))
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


def plain(path):
    """The same line by line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            time_ns, device, lba, sectors, op = (int(field) for field in line.split())
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: a line must be five integers: time_ns device lba sectors op"
            ) from error
        if not (0 <= time_ns < 1 << 61 and 0 <= lba < 1 << 48 and 1 <= sectors < 1 << 22 and op in (0, 1)):
            raise ValueError(
                f"{path}, line {number}: allowed: time 0 to 2^61 ns, lba 0 to 2^48, sectors 1 to 2^22, op 0 or 1"
            )
        if not 0 <= device < 1 << 32:
            raise ValueError(f"{path}, line {number}: device must be from 0 to 2^32")
        rows.append((time_ns, device, lba, sectors, op))
    if not rows:
        raise ValueError(f"{path}: the trace has no requests; add at least one line")
    requests = np.array(rows, np.int64)
    return requests[np.argsort(requests[:, 0], kind="stable")]


def verdict(parse, path):
    """Requests, or what is wrong."""
    try:
        return parse(path).tolist()
    except ValueError as error:
        return str(error)


EDGES = (1 << 22, 1 << 32, 1 << 48, 10**18, 1 << 61, 1 << 63, 1 << 64)
NUMBERS = st.one_of(st.integers(0, 9), st.sampled_from([edge + step for edge in EDGES for step in (-1, 0, 1)]))
WORDS = st.one_of(
    NUMBERS.map(lambda number: b"%d" % number),
    st.sampled_from([b"+5", b"-1", b"1_0", b"007", b"0" * 30, b"9" * 4301, b"x", b"1x", b"", b"\xef\xbc\x95", b"\xff"]),
)
BETWEEN = st.sampled_from([b" "] * 9 + [b"  ", b"\t", b"\r", b"\x0b", b"\x1c", b"\xc2\xa0", b"\xc2\x85", b"\0"])
ENDS = st.sampled_from([b"\n"] * 9 + [b"\r\n", b"\r", b"\n\n", b" \n", b"\x0c\n", b"\xe2\x80\xa8", b"\r\r\n", b""])
GOOD = st.tuples(
    st.integers(0, (1 << 61) - 1), st.integers(0, 9), st.integers(0, 99), st.integers(1, 9), st.integers(0, 1)
).map(lambda row: b" ".join(b"%d" % number for number in row) + b"\n")
ODD = st.tuples(WORDS, BETWEEN, WORDS, BETWEEN, WORDS, BETWEEN, st.sampled_from([b"8", b"0"]), BETWEEN, WORDS, ENDS)


@settings(max_examples=examples(500))
@given(st.lists(st.one_of(GOOD, GOOD, ODD.map(b"".join), st.binary(max_size=20)), max_size=8))
def test_fast_parser_equals_line_parser(tmp_path_factory, lines):
    """The same requests, or the same refusal of the same line."""
    path = tmp_path_factory.getbasetemp() / "trace"
    path.write_bytes(b"".join(lines))
    assert verdict(load_trace, path) == verdict(plain, path)


@pytest.mark.parametrize("line", [b"1 0 0 8 1\n", b"+1 0 0 8 1\r\n", b" 1\t0 0 8 1\x0b"])
def test_trace_lines_of_both_forms_may_be_mixed(tmp_path, line):
    (tmp_path / "trace").write_bytes((line + b"0 0 0 8 0\n") * 300)
    requests = load_trace(tmp_path / "trace")
    assert requests.tolist() == [[0, 0, 0, 8, 0]] * 300 + [[1, 0, 0, 8, 1]] * 300


def test_command_records_and_replays_block_trace(capsys, monkeypatch, tmp_path):
    words = ("drive", "record", str(tmp_path / "trace"), "--tokens", "100", "--steps", "1", "-o", "json")
    code, out, _ = vcsd(capsys, monkeypatch, *words)
    assert (code, json.loads(out)["requests"]) == (0, len(load_trace(tmp_path / "trace")))
    code, out, _ = vcsd(capsys, monkeypatch, "drive", "replay", str(tmp_path / "trace"), "-o", "json")
    result = json.loads(out)
    assert (code, result["preset"]) == (0, "nvmevirt-970pro")
    took_s = result["parse_wall_s"] + result["simulate_wall_s"]
    assert result["requests_per_wall_s"] == pytest.approx(result["requests"] / took_s)
    code, _, err = vcsd(capsys, monkeypatch, *words, "--method", "zz")
    assert code and "'zz'" in err
