"""The figures' rows, and the sums of their parts.

partner of: eval/papers/instinfer/throughput.py, eval/papers/instinfer/breakdown.py,
eval/papers/instinfer/engine_breakdown.py, eval/papers/instinfer/scaling.py, eval/papers/instinfer/sensitivity.py,
eval/papers/instinfer/options.py
"""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from csd_spec.network import Network
from tests.eval.papers.instinfer.setups import setup_of as paper_setup
from tests.eval.papers.instinfer.setups import small_setup
from vcsd_eval.papers.instinfer import breakdown, engine_breakdown, scaling, sensitivity, throughput
from vcsd_eval.papers.instinfer.options import Sweep, Work, extent, run, setup_of
from vcsd_eval.papers.instinfer.runs import simulate
from vcsd_eval.papers.options import MachineOptions, Simulated


def test_parts_add_up_to_step_and_shares_to_one():
    setup = paper_setup(input=64, output=64)
    rows = breakdown.rows(simulate(setup, breakdown.cases((4,), 1)), (4,), 1)
    assert [row["system"] for row in rows] == ["FlexGen", "FlexGen-SparQ", "InstI-Dense", "InstI-SparF", "Ours"]
    for row in rows:
        assert row["kv_s"] + row["engine_s"] + row["other_s"] - row["hidden_s"] == pytest.approx(row["step_s"])
        assert sum(row[share] for share in breakdown.SHARES) == pytest.approx(1)
    assert rows[-1]["hidden_s"] > 0


def test_throughput_has_a_row_for_each_system():
    rows = throughput.rows(simulate(small_setup(), throughput.cases((2, 4), 1)), (2, 4), 1)
    assert [(row["batch"], row["system"]) for row in rows[:6]] == [
        (2, name) for name in ("DeepSpeed", "FlexGen", "FlexGen-SparQ", "InstI-Dense", "InstI-SparF", "Ours")
    ]
    assert len(rows) == 12
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_units_of_a_drive_add_up():
    rows = engine_breakdown.rows(simulate(small_setup(), engine_breakdown.cases(2, 1)), 2, 1)
    for system in ("InstI-Dense", "InstI-SparF", "Ours"):
        assert sum(row["share"] for row in rows if row["system"] == system) == pytest.approx(1)


def test_speedup_is_over_the_first_number_of_drives():
    rows = scaling.rows(simulate(small_setup(), scaling.cases(4, (2, 4))), 4, (2, 4))
    two, four = ({row["system"]: row for row in rows if row["drives"] == drives} for drives in (2, 4))
    for system, row in four.items():
        assert two[system]["speedup"] == 1
        assert row["speedup"] * two[system]["tokens_per_s"] == pytest.approx(row["tokens_per_s"])


def test_eval_scaling_continues_after_a_kill(tmp_path):
    """The process is killed when one of two drives' figures is kept."""
    words = ["eval", "scaling", "--model", "opt-6.7b", "--batch-sizes", "2", "--drives", "1,32", "--workers", "1"]
    words += ["--prompt-tokens", "64", "--new-tokens", "64", "--checkpoint-dir", str(tmp_path), "-o", "json"]
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", *words]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (result := [path for path in tmp_path.glob("*.jsonl") if path.read_text().count("\n")]):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    lines = [json.loads(line) for line in result[0].read_text().splitlines(keepends=True) if line.endswith("\n")]
    lines[0][1]["tokens_per_s"] = 1e9  # marks a figure that is not simulated again
    result[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(command, capture_output=True, check=True)
    rates = [row["tokens_per_s"] for row in json.loads(done.stdout)["rows"]]
    assert rates.count(1e9) == 1
    assert not list(tmp_path.iterdir())


def test_scaling_on_workers_and_a_cluster_is_refused():
    with pytest.raises(ValueError, match="--workers and --ray cannot be combined"):
        run(Simulated(workers=2), small_setup(), [], Sweep(ray="local"))


def test_sensitivity_falls_with_compression():
    shares, each = {4: 0.4, 16: 0.2}, [1, 4, 16]
    rows = sensitivity.rows(simulate(paper_setup(), sensitivity.cases(2, 1, each, shares)), 2, 1, each, shares)
    assert [row["compression"] for row in rows] == [1, 4, 16]
    assert [row["step_s"] for row in rows] == sorted((row["step_s"] for row in rows), reverse=True)


def test_options_select_the_setup():
    machine, some = MachineOptions("opt-6.7b", "h100", "pcie5"), Simulated()
    setup = Work(None, 100, 20).setup(machine, some, 4)
    assert (setup.model.name, setup.gpu.name, setup.host.name) == ("opt-6.7b", "h100", "pcie5")
    assert (setup.input, setup.output, setup.compression, setup.simulated_layers) == (100, 20, 4, 2)
    assert simulate(setup, []).sampled == {"layers": {"simulated": 2, "of": 32}}
    assert extent(simulate(setup, [])) == "modelled, 2 of 32 layers simulated"
    every = setup_of(machine, Simulated(all_layers=True))
    assert every.simulated_layers == 32
    assert extent(simulate(every, [])) == "modelled"
    with pytest.raises(ValueError, match=r"compression = 0\.5"):
        Work().setup(machine, some, 0.5)


def test_a_slow_network_ends_the_scaling_of_drives():
    counts = (1, 2, 4)
    near, far = (
        scaling.rows(simulate(replace(small_setup(), network=network), scaling.cases(4, counts)), 4, counts)
        for network in (None, Network(name="slow", bytes_per_s=1_000_000, message_ns=1000))
    )
    assert {row["network_s"] for row in near} == {0}
    for mine, theirs in zip(far, near, strict=True):
        assert mine["network_s"] > 0
        assert mine["step_s"] > theirs["step_s"]
        assert mine["efficiency"] == pytest.approx(mine["speedup"] / mine["drives"])
    assert {row["limit"] for row in far} == {"network"}
    assert max(row["efficiency"] for row in far if row["drives"] == 4) < 0.5
