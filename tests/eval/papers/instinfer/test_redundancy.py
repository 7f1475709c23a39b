"""Redundancy by drives, batch size, tokens and network: properties common to all rows, and the verdict on parity."""

import json

import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.eval.papers.instinfer.setups import setup_of
from tests.vcsd_cli.test_main import vcsd
from vcsd.redundancy_cost import FIGURES, Decode
from vcsd_eval.papers.instinfer.redundancy import Combinations, row, verdict

ALL = ["none", "mirror", "parity", "recompute"]


def test_eval_redundancy_json_has_a_row_for_each_combination(capsys, monkeypatch):
    code, out, _ = vcsd(capsys, monkeypatch, "eval", "redundancy", "--drives", "4,20", "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert set(found) == {"modelled", "model", "gpu", "rows", "parity"}
    sizes = [(each["drives"], each["batch"], each["tokens"], each["network"]) for each in found["rows"]]
    assert len(set(sizes)) == len(sizes) == 16
    for each in found["rows"]:
        assert list(each["alternatives"]) == ALL and set(each["least"]) == set(FIGURES)
        assert each["alternatives"]["none"]["full_s"] is None
    assert "none is measured" in found["parity"]["sentence"]


def test_redundancy_marks_figures_without_room(capsys, monkeypatch):
    words = ("--drives", "8", "--batch-sizes", "256", "--tokens", "32768", "--networks", "none")
    _, out, err = vcsd(capsys, monkeypatch, "eval", "redundancy", *words)
    (line,) = [line for line in out.splitlines() if "32768" in line]
    assert "(10,308)" in line and "R R P P" in line  # 15.5 TB of drives do not hold a mirror
    assert "it serves first in 1" in " ".join(err.split())


def test_row_recompute_takes_prefill_and_decode_steps():
    """OPT-13B on an A6000, 4 sequences."""
    setup = setup_of(input=1000, output=24)
    host_s = setup.prefill_gpu_s(4) + 24 * (setup.gpu_s(4) + setup.attention_s(4))
    found = row(setup_of(), Decode.of(setup.model.shape, 4, 4, 1024, 24))
    assert found["alternatives"]["recompute"]["degraded_s"] == pytest.approx(host_s)
    assert found["alternatives"]["mirror"]["storage_bytes"] == 1.5 * 4 * 1024 * setup.model.shape.kv_bytes_per_token


def test_rows_slow_network_delays_parity_and_not_the_mirror():
    setup = setup_of(drive=INSTCSD_ZYNQ7045_8CH)
    near, far = Combinations(drives="8", batch_sizes="16", tokens="2048", networks="none,25gbe").rows(setup)
    seconds = [[each["alternatives"][name]["degraded_s"] for name in ("mirror", "parity")] for each in (near, far)]
    assert seconds[0][0] == seconds[1][0] == 0
    assert seconds[0][1] < seconds[1][1]


def test_verdict_counts_rows():
    found = verdict(Combinations(drives="8", batch_sizes="256", tokens="2048,32768", networks="none").rows(setup_of()))
    assert (found["rows"], found["useful"]) == (2, 2)
    assert found["least"] == {"storage_bytes": 0, "step_bytes": 0, "degraded_s": 1, "full_s": 2}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--drives", "1"), "--drives '1': each must be at least 2"),
        (("--drives", "41"), "--drives 41: the model has 40 KV heads"),
        (("--tokens", "1024"), "--decoded 1024: must be fewer than tokens = 1024"),
        (("--networks", "fast"), "--networks 'fast': must be one of "),
    ],
)
def test_eval_redundancy_wrong_options_are_one_line(capsys, monkeypatch, words, reason):
    code, _, err = vcsd(capsys, monkeypatch, "eval", "redundancy", *words)
    assert code == 2 and reason in err and err.count("\n") == 1
