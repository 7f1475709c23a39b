"""Cases of vLLM with prefixes in drives, with a stand-in for vLLM; vLLM itself: `./dev vllm`.

partner of: eval/bench/vllm.py, eval/bench/vllm_child.py
"""

import sys
from pathlib import Path

import pytest

from vcsd_eval.bench.vllm import PREFIX, VllmLoad, experiment, prompt

CASES = ["shared_prefix", "restarted", "drive_killed", "four_at_once", "bfloat16"]


@pytest.fixture
def python(tmp_path):
    """A "Python" that runs the stand-in, for any requested module."""
    file = tmp_path / "python"
    program = Path(__file__).with_name("fake_vllm.py")
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    file.chmod(0o700)
    return file


@pytest.mark.parametrize(("how", "failed"), [("", False), ("wrong", True), ("blind", True)])
def test_missing_hit_or_wrong_token_fails(python, monkeypatch, how, failed):
    monkeypatch.setenv("FAKE_VLLM", how)
    found = experiment(VllmLoad(python=python, drives=1))
    assert list(found.result) == CASES and found.failed == failed
    for each in found.result.values():
        assert each["tokens_equal"] == (how != "wrong")
        assert each["external_hits"] == (0 if how == "blind" else PREFIX * each["requests"])


def test_early_exit_of_vllm_is_reported_with_output(python, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "dead")
    with pytest.raises(ConnectionError, match="vLLM exited early: no such model"):
        experiment(VllmLoad(python=python, drives=1))


def test_missing_vllm_environment_is_one_line_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such Python interpreter; run \./dev vllm"):
        experiment(VllmLoad(python=tmp_path / "python"))


def test_prompts_share_the_stated_prefix():
    first, second = prompt(0), prompt(7)
    assert len(first) == len(second) == 600 and first[:PREFIX] == second[:PREFIX] and first[PREFIX:] != second[PREFIX:]
    assert first[PREFIX] != second[PREFIX] or first[PREFIX + 1] != second[PREFIX + 1]
