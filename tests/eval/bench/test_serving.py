"""The shipped model serves traces: correct under every policy, and no memory growth.

partner of: eval/bench/serving.py
"""

from __future__ import annotations

import json

import pytest

from vcsd_eval.bench import serving
from vcsd_eval.bench.serving import ServingLoad, experiment, requests

FEW = {"policies": "orbitflow,ours,in-two-places,tierkv", "requests": 10, "longest": 96}


def test_served_answers_equal_each_request_alone() -> None:
    found = experiment(ServingLoad(**FEW))
    assert not found.failed
    assert set(found.result["policies"]) == set(FEW["policies"].split(","))
    for row in found.result["rows"]:
        assert (row["right"], row["wrong"], row["failed"], row["left_bytes"]) == (10, 0, 0, 0)
        assert row["cancelled"] == 1
        assert 0 < row["peak_bytes"]["device"] <= row["limit_bytes"]["device"]
    assert found.result["policies"]["ours"]["peak_bytes"]["csd"] > 0


def test_wrong_answer_is_detected(monkeypatch) -> None:
    alone = serving.alone
    monkeypatch.setattr(serving, "alone", lambda *given: [[*each[:-1], each[-1] ^ 1] for each in alone(*given)])
    found = experiment(ServingLoad(policies="orbitflow", requests=2, longest=64))
    assert found.failed and found.result["wrong"] == 2


def test_traces_are_shortened_to_context_of_model(tmp_path) -> None:
    lines = [{"timestamp": 1000 * n, "input_length": 6000 + n, "output_length": 300, "hash_ids": []} for n in range(9)]
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    asked = requests(ServingLoad(trace=trace, longest=128))
    assert len(asked) == 9 and all(1 <= len(each.prompt) <= 124 and each.new >= 4 for each in asked)
    assert asked[0].at == 0 and asked == sorted(asked, key=lambda each: each.at)


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [1, pytest.param(3, marks=pytest.mark.long)])
def test_memory_is_flat_under_load(minutes: int) -> None:
    found = experiment(ServingLoad(policies="ours", requests=12, longest=96, minutes=minutes)).result
    assert (found["wrong"], found["left_bytes"]) == (0, 0)
    assert found["anonymous_growth_bytes"] <= serving.MAX_ANONYMOUS_BYTES
    assert (found["descriptor_growth"], found["thread_growth"]) == (0, 0)


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policies = 'best': must be all, or of reactive, flexgen, dual-blade"):
        experiment(ServingLoad(policies="best"))
