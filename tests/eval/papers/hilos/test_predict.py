"""Predictions of HILOS: frozen, and consistent with byte counts, the paper's formula and the engine.

partner of: eval/papers/hilos/inputs.py, eval/papers/hilos/items.py, eval/papers/hilos/systems.py
"""

import hashlib
from pathlib import Path

import pytest

from kv_cache import HOST, BlockKey, IterationRunner
from kv_cache.policies.flexgen import FlexGen
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers
from vcsd_eval.papers.hilos.inputs import Inputs, draw
from vcsd_eval.papers.hilos.items import CONTEXTS, DRIVES
from vcsd_eval.papers.hilos.predict import (
    FROZEN,
    SAMPLES,
    drawn_values,
    intervals,
    predict,
    predictions,
    strongest_inputs,
)
from vcsd_eval.papers.hilos.systems import GB, HilosBatch, Systems, formula_fraction, link_bytes, load_model
from vcsd_eval.papers.instinfer import steps
from vcsd_eval.papers.options import MachineOptions

OPT66 = load_model("opt-66b")


def test_predictions_equal_frozen_file_and_its_hash():
    result = predict(MachineOptions()).result
    sha256 = hashlib.sha256(FROZEN.read_bytes()).hexdigest()
    assert result["sha256"] == sha256
    assert sha256 in (Path(__file__).parents[4] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(row["low"] <= row["predicted"] <= row["high"] for row in result["predictions"])
    assert result["predicted_items"] >= 14
    with pytest.raises(ValueError, match=r"predictions.csv: f2a is .*, the model gives None: predictions are frozen"):
        predictions(
            {name: interval for name, interval in intervals(drawn_values(draw(SAMPLES))).items() if name != "f2a"}
        )
    with pytest.raises(ValueError, match="leave these options out"):
        predict(MachineOptions(gpu="h100"))
    with pytest.raises(AttributeError, match="has no row speed: add one"):
        _ = Inputs(mfu=1).speed


def test_strongest_input_has_largest_rank_correlation():
    draws = [Inputs(fast=each, slow=-each % 3) for each in range(6)]
    result = strongest_inputs(draws, {"rises": [1, 2, 4, 8, 16, 32], "falls": [9, 7, 7, 5, 3, 1], "same": [1] * 6})
    assert result["rises"] == {"input": "fast", "rank_correlation": pytest.approx(1)}
    assert result["falls"]["input"] == "fast"
    assert result["falls"]["rank_correlation"] < -0.9
    assert result["same"] is None


def test_alpha_balances_flash_and_link():
    alpha = formula_fraction(24 * GB, 8 * GB)
    assert alpha == 0.5
    assert (2 - alpha) / 24 == alpha / 8


def test_link_traffic_falls_by_half_of_tokens():
    """The engine's bytes of a step with the KV cache offloaded, over those of q, k, v and the output."""
    tokens, row = 512, 2 * OPT66.kv_heads * OPT66.head_dim
    transfers = SimulatedTransfers(steps.host_memory(GB), lambda attention: LayerTime(1))
    run = IterationRunner(transfers.machine, range(1), FlexGen(home=HOST).layers, transfers)
    for part in run.parts:
        run.table.add(BlockKey("a", 0, part), row, HOST, tokens)
    run.run({"a": 1}, {"a": row})
    moved = sum(each.bytes for each in run.traffic.values())
    assert moved / link_bytes(OPT66.shape) == (tokens + 1) / 2


@pytest.mark.parametrize("tokens", CONTEXTS)
def test_more_drives_are_never_slower(tokens):
    for systems in map(Systems, draw(40)):
        few, more, most = (systems.hilos(HilosBatch(OPT66, tokens), drives) for drives in DRIVES)
        assert few <= more <= most


def test_flexgen_step_equals_engine():
    """With full overlap, the closed form is the steady step of the policy on the simulated machine."""
    (inputs,) = draw(1)
    systems, work = Systems(Inputs(**vars(inputs) | {"flex_overlap": 1.0})), HilosBatch(OPT66, 16384)
    rate = systems.raid()
    _, _, *compute_s = systems.flex_parts(work, rate)
    stored = steps.TierContents(home=HOST, tokens=work.tokens, rows={"a": round(work.kv_bytes / work.tokens / 2)})
    layer = LayerTime(round(1e9 * sum(compute_s)))
    engine_s = steps.step_s(steps.host_memory(rate), FlexGen(home=HOST).layers, OPT66.layers, stored, layer)
    assert work.batch / systems.flex(work) == pytest.approx(engine_s, rel=0.03)
