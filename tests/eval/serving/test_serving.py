"""`vcsd eval serving`, and its machines.

partner of: eval/serving/serving.py, eval/serving/systems.py, eval/serving/machines.py, eval/serving/pages_error.py
"""

import json
from pathlib import Path

import pytest

from tests.vcsd_cli.test_main import vcsd
from vcsd_eval.serving.machines import A5000, A6000, COSTS, drives
from vcsd_eval.serving.pages_error import output_error
from vcsd_eval.serving.serving import AdmissionOptions, TraceLoad, experiment
from vcsd_eval.serving.systems import OTHERS, SYSTEMS, run

PLANES2 = "progressive"


def test_machines_match_the_papers_profiles():
    costs = A6000.costs([16384])
    assert costs.fetch[0] / costs.compute[0] == pytest.approx(6.1, rel=0.01)  # OrbitFlow, section 2.2
    assert A5000.slo_s(1.0) == pytest.approx(0.0589, abs=1e-4)
    assert drives(4).bytes_per_s == 4 * drives(1).bytes_per_s == 4 * 8 * 1.4e9
    assert drives(1).token_bytes == 2 * 8 * 128 * 2
    assert 0.5 < drives(1, PLANES2).token_bytes / drives(1).token_bytes < 0.55


def test_machines_follow_data_sheets():
    h100, eight, a100 = (COSTS[name] for name in ("h100", "8xh100", "8xa100"))
    assert h100.compute.linear_s() == pytest.approx(16.06e9 / 3.35e12, rel=0.01)  # the weights, read once
    assert eight.compute.token_s == pytest.approx(80 * 4096 / 26.8e12)
    assert eight.fetch_token_s == pytest.approx(80 * 4096 / 512e9)
    assert a100.room_blocks == eight.room_blocks and a100.compute.linear_s() > eight.compute.linear_s()
    assert all(COSTS[name].longest_tokens > 200_000 for name in ("4xa6000", "h100", "8xa100", "8xh100"))
    assert eight.compute.prefill_s(100_000) > 2.2 * eight.compute.prefill_s(50_000)  # attention grows by the square
    parts = [eight.compute.prefill_s(until, until - 1000) for until in range(1000, 50_001, 1000)]
    starts_s = 49 * eight.compute.overlay.start_s
    assert sum(parts) == pytest.approx(eight.compute.prefill_s(50_000) + starts_s) and parts[-1] > parts[0]


def test_8_bit_pages_have_small_error():
    assert output_error("fp16") < 1e-3 < output_error(PLANES2) < 0.03


def test_systems_are_compared_on_one_trace(tmp_path):
    picture = tmp_path / "deadlines.svg"
    outcome = experiment(TraceLoad(requests=6, load="1,4", systems="all", picture=picture))
    rows = outcome.result["rows"]
    assert [row["system"] for row in rows[: len(rows) // 2]] == [*SYSTEMS, *OTHERS]
    assert set(outcome.result["systems"]) == set(SYSTEMS | OTHERS)
    for row in rows:
        assert row["requests"] == 6 and 0 <= row["deadline_attainment"] <= 1 and row["end_to_end_s"] > 0
        assert (row["output_error"] > 0) == bool((SYSTEMS | OTHERS)[row["system"]].drives)
    assert picture.read_text().startswith("<?xml")
    json.dumps(outcome.result)


def test_arrivals_may_be_in_steps_or_seconds(tmp_path):
    requests = [{"input_tokens": 500, "output_tokens": 40, "arrival_step": 100 * n} for n in range(5)]
    path = tmp_path / "orbitflow.json"
    path.write_text(json.dumps({"x_lambda2.0x": {"slo_base_blocks": 60, "requests": requests}}))
    for arrivals in ("seconds", "steps"):
        result = experiment(TraceLoad(trace=path, arrivals=arrivals)).result
        assert result["systems"]["ours"]["requests"] == 5
        assert result["slo_s"] == pytest.approx(1.5 * A5000.compute.decode_s(1, 60 * 16))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"load": "fast"}, "load = 'fast'"),
        ({"load": "0"}, "at least 1e-06"),
        ({"load": "nan"}, "at least 1e-06"),
        ({"load": "1,2,1"}, "names one twice"),
        ({"slo_scale": "tight"}, "slo_scale = 'tight'"),
        ({"slo_scale": "1,0.01"}, "slo_scale = '1,0.01': each must be at least 0.1"),
        ({"jobs": 2, "ray": "auto"}, "--jobs and --ray"),
        ({"picture": Path("curves.txt")}, "a picture's name ends in"),
        ({"engine": "tpu"}, "engine = 'tpu'"),
        ({"systems": "some"}, "systems = 'some'"),
    ],
)
def test_invalid_trace_is_one_line_error(given, says):
    with pytest.raises(ValueError, match=says):
        experiment(TraceLoad(**given))


@pytest.mark.parametrize(
    "words",
    [
        ["--prefill-chunk-tokens", "-1"],
        ["--order", "lifo"],
        ["--aging-factor", "-2"],
        ["--max-queued-requests", "0"],
        ["--max-paused-steps", "0"],
        ["--max-batch-size", "257"],
        ["--jobs", "0"],
        ["--load", "fast"],
        ["--slo-scale", "0"],
        ["--engine", "tpu"],
    ],
)
def test_invalid_options_are_one_line_error(capsys, monkeypatch, words):
    code, out, err = vcsd(capsys, monkeypatch, "eval", "serving", *words)
    assert (code in (1, 2), out, len(err.splitlines())) == (True, "", 1)
    assert words[0].removeprefix("--").replace("-", "_") in err.replace("-", "_")


def jsonl(folder, requests):
    path = folder / "mooncake.jsonl"
    keys = ("timestamp", "input_length", "output_length")
    path.write_text(
        "".join(json.dumps(dict(zip(keys, request, strict=True), hash_ids=[])) + "\n" for request in requests)
    )
    return path


def test_oversized_request_is_named_or_rejected(tmp_path):
    trace = jsonl(tmp_path, [(0, 500, 20), (10, 100_000, 20), (20, 700, 20)])
    with pytest.raises(ValueError, match=r"request 1: 100,019 tokens, .* 18,400: --engine .* --reject") as raised:
        experiment(TraceLoad(trace=trace, load="1"))
    assert "\n" not in str(raised.value)
    rows = experiment(TraceLoad(trace=trace, load="1"), AdmissionOptions(reject=True)).result["rows"]
    assert {(row["requests"], row["rejected"]) for row in rows} == {(2, 1)}
    rows = experiment(TraceLoad(trace=trace, load="1", engine="8xh100")).result["rows"]
    assert {(row["requests"], row["rejected"]) for row in rows} == {(3, 0)}


def test_rejections_by_full_queue_are_in_table(tmp_path):
    trace = jsonl(tmp_path, [(0, 500, 20)] * 9)
    outcome = experiment(
        TraceLoad(trace=trace, load="1"),
        AdmissionOptions(max_batch_size=2, max_queued_requests=3, prefill_chunk_tokens=256, order="srtf"),
    )
    row = outcome.result["systems"]["ours"]
    assert row["rejected"] == 4 and row["reject_reasons"] == {"the queue is full": 4} and row["max_queue_wait_s"] > 0
    assert set(row["path_bytes"]) == {"host_link", "drives"} and set(row["tbt_s"]) == {"p50", "p95", "p99"}
    assert list(outcome.shown[-1].columns[-1].cells) == ["4"] * len(SYSTEMS)


def test_sweeps_are_the_same_in_any_number_of_processes(tmp_path):
    one, two = (
        experiment(TraceLoad(requests=3, load="1,4", slo_scale="1,2", jobs=jobs, picture=tmp_path / "p.svg")).result
        for jobs in (1, 2)
    )
    assert one == two
    at = [(row["load"], row["slo_scale"], row["system"]) for row in one["rows"]]
    assert at == [(load, scale, name) for load in (1, 4) for scale in (1, 2) for name in SYSTEMS]
    assert one["systems"]["ours"] == one["rows"][-1] and one["slo_scale"] == 2


def test_a_sweep_on_a_cluster_is_the_same(ray_cluster):
    one, two = (experiment(TraceLoad(requests=4, ray=address)).result for address in (None, "local"))
    assert one == two


def test_a_killed_sweep_continues(tmp_path, monkeypatch):
    load, done = TraceLoad(requests=3, load="1", progress_dir=tmp_path), []

    def work(given, tick):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(given.system)
        return run(given, tick)

    monkeypatch.setattr("vcsd_eval.serving.serving.run", work)
    with pytest.raises(KeyboardInterrupt):
        experiment(load)
    monkeypatch.setattr(
        "vcsd_eval.serving.serving.run", lambda given, tick: done.append(given.system) or run(given, tick)
    )
    again = experiment(load).result
    assert done == list(SYSTEMS)
    assert again == experiment(load).result and len(done) == 2 * len(SYSTEMS)  # the first one has left nothing
