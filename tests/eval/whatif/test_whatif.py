"""What-if sweeps: fields, front, files, continuation, and agreement with the emulator with payload.

partner of: eval/whatif/point.py
"""

import csv
import json
from dataclasses import replace

import pytest

from csd_firmware import InProcessDrive
from csd_spec import AttentionConfig, CompressionBudget
from csd_spec.presets import INSTCSD_OVERLAPPED, INSTCSD_ZYNQ7045_8CH
from host_driver.driver import Driver
from host_driver.random_decode import random_decode
from tests.vcsd_cli.test_main import vcsd
from vcsd_eval.papers.profiles import Model
from vcsd_eval.whatif import whatif as module
from vcsd_eval.whatif.point import DesignPoint, simulate
from vcsd_eval.whatif.whatif import FileOptions, SweepOptions, whatif

LLAMA = Model.load("llama-3-8b")
SMALL = ["context=512", "batch=1", "sampled_layers=1"]


def run(tmp_path, vary, cost=None, **files):
    return whatif(
        "instcsd-overlapped", SweepOptions(vary, SMALL, cost), FileOptions(checkpoint_dir=tmp_path / "kept", **files)
    )


def test_rows_are_all_combinations(tmp_path):
    result = run(tmp_path, ["channels=4,8", "method=dense,sparf", "network=25gbe,100gbe-rdma"]).result
    rows = result["rows"]
    assert result["points"] == len(rows) == 8 and result["layers"] == 32 and result["sampled_layers"] == 1
    assert len({(row["geometry.channels"], row["method"], row["network"]) for row in rows}) == 8
    for row in rows:
        assert row["step_ms"] == pytest.approx(row["flash_ms"] + row["engine_ms"] + row["transfer_ms"])
        assert row["joules_per_token"]["low"] < row["joules"] < row["joules_per_token"]["high"]
    slow, fast = ([row["transfer_ms"] for row in rows if row["network"] == name] for name in ("25gbe", "100gbe-rdma"))
    assert min(slow) > max(fast)


def test_front_has_points_that_no_other_dominates(tmp_path):
    result = run(tmp_path, ["channels=4,8,16", "engine.kernels=1,2"], ["channels=5", "engine.kernels=3"]).result
    rows, names = result["rows"], result["objectives"]
    assert names == ["step_ms", "joules", "cost"]
    assert [row["cost"] for row in rows] == [5 * row["geometry.channels"] + 3 * row["engine.kernels"] for row in rows]
    for row in rows:
        mine = [row[name] for name in names]
        others = [[other[name] for name in names] for other in rows]
        dominated = any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others)
        assert row["pareto"] is not dominated
    assert result["front"] == sum(row["pareto"] for row in rows) >= 1


def test_point_that_does_not_fit_says_so(tmp_path):
    rows = run(tmp_path, ["blocks_per_plane=8,2048"]).result["rows"]
    small = whatif(
        "instcsd-overlapped",
        SweepOptions(["blocks_per_plane=8,2048"], ["context=65536", "batch=64", "sampled_layers=1"]),
        FileOptions(checkpoint_dir=tmp_path / "kept"),
    ).result["rows"]
    assert [row["error"] for row in rows] == ["", ""]
    assert "do not hold" in small[0]["error"] and small[0]["step_ms"] is None and not small[0]["pareto"]
    assert small[1]["error"] == "" and small[1]["pareto"]


def test_files_have_the_points(tmp_path):
    outcome = run(tmp_path, ["channels=4,8"], csv_out=tmp_path / "points.csv", plot=tmp_path / "front.svg")
    with (tmp_path / "points.csv").open(newline="") as file:
        result = list(csv.DictReader(file))
    assert [float(row["step_ms"]) for row in result] == [row["step_ms"] for row in outcome.result["rows"]]
    assert "joules_per_token.high" in result[0] and (tmp_path / "front.svg").stat().st_size > 5000


def test_killed_sweep_continues(tmp_path, monkeypatch):
    done = []

    def dies(points, *arguments):
        done.append(len(points))
        raise KeyboardInterrupt

    whole = run(tmp_path, ["channels=4,8"]).result
    kept_put = module.ResultCache.put
    monkeypatch.setattr(module, "cores", lambda: 1)
    monkeypatch.setattr(module.ResultCache, "put", lambda *a: (kept_put(*a), dies(["one"]))[0])
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, ["channels=4,8"])
    monkeypatch.setattr(module.ResultCache, "put", kept_put)
    ran = []
    monkeypatch.setattr(
        module, "sweep", lambda work, items, *rest: ran.append(len(items)) or [rest[-1](0, work(items[0]))]
    )
    assert run(tmp_path, ["channels=4,8"]).result == whole and ran == [1]
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    ("vary", "reason"),
    [
        (["chanels=4"], "field 'chanels': must be one of method, "),
        (["lanes"], "must be FIELD=VALUE"),
        (["channels=4,"], "must be FIELD=VALUE"),
        (["channels=0"], "channels: must be greater than or equal to 1"),
        (["method=magic"], "method = 'magic': must be one of dense"),
        (["network=3gbe"], "3gbe"),
        (["drives=3"], "drives = 3: must divide the 8 KV heads"),
        (["page_share=big"], "page_share = 'big': must be a number"),
        (["batch=1"], "batch: is set and varied"),
        (["channels=" + ",".join(["4"] * 5000)], "must be at most 4,096"),
    ],
)
def test_invalid_field_is_one_line(tmp_path, vary, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        run(tmp_path, vary)
    assert "\n" not in str(caught.value)


def test_cost_of_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="method = 'sparf': a cost needs a number"):
        run(tmp_path, ["channels=4"], ["method=1"])


def test_command_prints_json(capsys, monkeypatch, tmp_path):
    words = [
        "whatif",
        "instcsd-zynq7045-8ch",
        "--vary",
        "channels=4,8",
        "-o",
        "json",
        "--checkpoint-dir",
        str(tmp_path),
    ]
    for each in SMALL:
        words += ["--set", each]
    code, out, _ = vcsd(capsys, monkeypatch, *words)
    assert code == 0 and json.loads(out)["drive"] == "instcsd-zynq7045-8ch"


@pytest.mark.parametrize("spec", [INSTCSD_ZYNQ7045_8CH, INSTCSD_OVERLAPPED], ids=["serial", "overlapped"])
def test_dense_step_is_that_of_the_emulator(spec):
    """The same layers, tokens and layout with payload take the same time but for lanes that the step begins at."""
    point = DesignPoint(spec, LLAMA, method="dense", drives=1, context=1000, batch=1, sampled_layers=4)
    device = InProcessDrive(spec)
    driver = Driver([device], replace(point.shape, layers=4), AttentionConfig("dense", CompressionBudget(1)))
    emulated_ms = random_decode(driver, 1000, 3)["step_ns"][-1] / 1e6
    driver.close()
    device.close()
    assert simulate(point)["step_ms"] * 4 / 32 == pytest.approx(emulated_ms, rel=0.05)
