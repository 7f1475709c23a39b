"""`vcsd eval policies`: every policy on a trace, a policy from a file, and refused inputs.

partner of: eval/serving/policies.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kv_cache.policies import POLICIES
from tests.vcsd_cli.test_main import vcsd
from vcsd_eval.serving.policies import PolicyOptions, experiment

FEW = {"requests": 4, "device_gb": 1.0}


def test_every_policy_has_a_row_of_the_same_requests() -> None:
    outcome = experiment(PolicyOptions(**FEW))
    rows = outcome.result["rows"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert len({row["tokens"] for row in rows}) == 1 and all(row["requests"] == 4 for row in rows)
    timed = {row["policy"]: set(row["timed_by"]) for row in rows}
    assert timed["flexgen"] == {"events"} and timed["orbitflow"] == {"jump", "chain"} and timed["lru"] == {"jump"}
    moved = {row["policy"]: sum(row["route_bytes"].values()) for row in rows}
    assert moved["deepspeed"] > moved["flexgen-half"] > moved["orbitflow"] and moved["in-storage"] == 0
    assert outcome.result["failed"] == []
    json.dumps(outcome.result)


def test_policy_from_file_serves_trace(tmp_path: Path) -> None:
    file, trace = tmp_path / "mine.py", tmp_path / "t.csv"
    file.write_text("from kv_cache.policies.reactive import Reactive\nPOLICIES = {'mine': Reactive}\n")
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens", *(f"{n},{500 + n},{5 + n}" for n in range(5))]
    trace.write_text("\n".join(lines) + "\n")
    rows = experiment(PolicyOptions(policy=f"{file}:mine,reactive", trace=trace, requests=3)).result["rows"]
    mine, ours = ({key: value for key, value in row.items() if key != "policy"} for row in rows)
    assert mine == ours and mine["requests"] == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--policy", "fifo"), "must be one of reactive"),
        (("--policy", ""), "must be one of"),
        (("--engine", "tpu"), "--engine 'tpu'"),
        (("--policy", "lru", "--device-gb", "0.01", "--requests", "1"), "the tier device has"),
        (("--policy", "lru", "--host-gb", "0", "--requests", "1"), "the tier host has"),
        (("--policy", "nope.py:x"), "nope.py: No such file"),
        (("--trace", "none.csv"), "none.csv"),
    ],
)
def test_invalid_policy_run_is_one_line_error(capsys, monkeypatch, options, reason) -> None:  # type: ignore[no-untyped-def]
    code, _, error = vcsd(capsys, monkeypatch, "eval", "policies", *options)
    assert code and reason in error and len(error.strip().splitlines()) == 1


LAZY = """
from kv_cache import Policy


class Lazy(Policy):
    def layers(self, it):
        it.attend(0)


POLICIES = {"lazy": Lazy}
"""


def test_policy_that_breaks_a_rule_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LAZY)
    with pytest.raises(ValueError, match=r":lazy: the policy ended its iteration before layer 1"):
        experiment(PolicyOptions(policy=f"{file}:lazy", **FEW))
    outcome = experiment(PolicyOptions(policy=f"{file}:lazy,reactive", **FEW))
    assert outcome.failed and [row["policy"] for row in outcome.result["rows"]] == ["reactive"]
    assert outcome.result["failed"][0]["policy"] == f"{file}:lazy"
    with pytest.raises(ValueError, match=r"mine.py has no policy 'other', it has lazy"):
        experiment(PolicyOptions(policy=f"{file}:other", **FEW))
