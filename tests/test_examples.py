"""Examples: one policy makes the same decisions in simulated time, with real bytes under a model, and in a server.

An endpoint answers a client.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path

import torch

from kv_cache import Trace
from kv_cache.cost import CostModel, ServingCost
from kv_cache.limits import TierLimits
from kv_cache.policies import policy_of
from kv_cache.simulation import engine_for
from kv_cache.trace import Request
from kv_cache.transfer.engine import IterationRecord
from tests.host_driver.hf.test_cache import llama, sharpen
from tests.vcsd_cli.test_main import vcsd
from vcsd.serving import serve
from vcsd.session import attach
from vcsd_eval.serving.policies import PolicyOptions, experiment

FILE = Path("examples/policy_30_lines.py")
ENDPOINT = Path("examples/endpoint_and_client.py")
POLICY = f"{FILE}:half"
PROMPT, NEW = [3, 1, 4, 1, 5, 9, 2, 6], 6
Decision = tuple[str, int, str, str]


def decisions(recorded: Sequence[IterationRecord]) -> list[tuple[list[int], list[Decision]]]:
    """New tokens of each iteration, and its acts: kind, layer, source, target. Keys and values may move together."""
    result = []
    for each in recorded:
        acts = [(act.kind, act.block.layer if act.block else act.layer, act.source, act.tier) for act in each.acts]
        if each.new:
            result.append((list(each.new.values()), list(dict.fromkeys(acts))))
    return result


def test_policy_decisions_equal_simulated_real_served(tmp_path: Path) -> None:
    assert len(FILE.read_text().splitlines()) <= 30
    with torch.inference_mode():
        model = sharpen(llama()).eval()
    layers, ids = model.config.num_hidden_layers, torch.tensor([PROMPT])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)

    with attach(model, policy=POLICY, tiers=TierLimits(files=tmp_path), record=True) as run:
        with_bytes = model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
        run.kv.real.settle()
        moved, real = dict(run.kv.real.moved), decisions(run.kv.runner.recorded or [])
        assert run.kv.simulated_bytes() == moved and len(moved) == 2  # replayed in modelled time
    assert torch.equal(with_bytes.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(with_bytes.logits, expected.logits, strict=True))

    with serve(model, policy=POLICY, tiers=TierLimits(files=tmp_path), background=False) as server:
        server.kv.runner.recorded = []
        assert server.submit(PROMPT, NEW).result() == expected.sequences[0, len(PROMPT) :].tolist()
        served = decisions(server.kv.runner.recorded)

    compute = CostModel.fitted(layers, step_s=0.01, token_s=1e-6, prefill_tokens_per_s=1e4)
    cost = ServingCost(name="small", compute=compute, fetch_s=1e-4, fetch_token_s=1e-5, room_blocks=100)
    request = Request(number=0, arrival=0.0, input_tokens=len(PROMPT), output_tokens=NEW)
    engine = engine_for(Trace(name="one", requests=[request]), cost, policy_of(POLICY), 1.0)
    assert engine.events is not None
    engine.events.runner.recorded = []
    engine.run()
    modelled = decisions(engine.events.runner.recorded)

    assert real == served == modelled and len(real) == NEW
    assert ("copy", layers - 1, "host", "device") in real[-1][1] and ("drop", 0, "", "device") not in real[-1][1]


def test_commands_accept_example_policy(capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (row,) = experiment(PolicyOptions(policy=POLICY, requests=2)).result["rows"]
    assert row["timed_by"] == {"events": sum(row["timed_by"].values())} and set(row["route_bytes"]) == {
        "host>device",
        "device>host",
    }
    code, out, _ = vcsd(capsys, monkeypatch, "run", "--policy", POLICY, "--max-new-tokens", "2", "-o", "json")
    assert code == 0 and json.loads(out)["agreement"]["tokens_equal"]


def test_endpoint_example_answers_client(capsys) -> None:  # type: ignore[no-untyped-def]
    assert len(ENDPOINT.read_text().splitlines()) <= 40
    assert runpy.run_path(str(ENDPOINT))["main"]() == "drive drive "
    assert capsys.readouterr().out == "drive drive \n"
