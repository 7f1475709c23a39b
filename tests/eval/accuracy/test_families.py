"""A sample of the architectures: outcomes, reasons looked up in the model, and processes that die.

partner of: eval/accuracy/tiny.py, eval/accuracy/refusals.py, eval/accuracy/family.py
"""

import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import vcsd
from host_driver.hf import attention
from host_driver.hf.tiers import TieredLayer
from kv_cache.limits import TierLimits
from tests.served import HANG_S
from vcsd_eval.accuracy import families, family
from vcsd_eval.accuracy.families import experiment, sweep
from vcsd_eval.accuracy.family import Row, try_family
from vcsd_eval.accuracy.refusals import confirmed
from vcsd_eval.accuracy.tiny import architectures, build

MIXED = ("gemma2", "gpt_oss", "qwen3_next", "llama4_text", "gemma3_text")
SERVED = (*MIXED, "llama", "gpt2", "opt", "bart", "roberta", "mixtral", "phi3", "gpt_bigcode", "qwen2_vl")


@pytest.mark.parametrize("name", SERVED)
def test_served_family_is_right(name):
    row = try_family(name)
    assert (row.outcome, row.reason) == ("right", "")
    assert 0 < row.difference < row.control / 4
    assert row.tokens_equal > 0.9


@pytest.mark.parametrize("policy", ["dual-blade", "reactive"])
@pytest.mark.parametrize("name", ["llama", "bart", "deepseek_v3", "diffllama", "paligemma", "gpt_oss", "cpmant"])
def test_served_family_in_tiers_is_bit_exact(name, policy):
    row = try_family(name, policy)
    assert (row.outcome, row.reason) == ("right", "")
    assert row.difference == 0 < row.control


def test_lost_bit_in_tiers_is_detected(monkeypatch):
    store = TieredLayer._stored

    def flipped(layer, part, states):
        rows = store(layer, part, states)
        if layer.index == 1 and layer.length > 42:
            rows[0, 0, 3, 0] *= 1 + 2.0**-12
        return rows

    monkeypatch.setattr(TieredLayer, "_stored", flipped)
    row = try_family("llama", "dual-blade")
    assert row.outcome == "wrong" and "logits differ" in row.reason


def test_bypassed_tiers_are_detected(monkeypatch):
    monkeypatch.setattr(vcsd, "TierLimits", lambda device, host, cache, max_tokens: TierLimits(max_tokens=max_tokens))
    row = try_family("llama", "reactive")
    assert row.outcome == "wrong" and "forwards were in tiers" in row.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral", "sliding_attention"),
        ("minimax", "cache of its own kind"),
        ("xglm", "AttentionInterface"),
        ("mllama", "cross-attention"),
        ("diffllama", "twice"),
        ("jetmoe", "did not pass the cached keys"),
        ("pi0", "has no num_hidden_layers and no num_attention_heads in its config"),
    ],
)
def test_refused_family_has_confirmed_reason(name, reason):
    row = try_family(name)
    assert row.outcome == "refused" and reason in row.reason
    assert row.reason_checked


@pytest.mark.parametrize(
    "reason",
    [
        "LlamaForCausalLM has layers of kind sliding_attention alone: nothing is for drives",
        "LlamaForCausalLM keeps cache_params instead of keys and values",
        "LlamaForCausalLM does not let its attention be replaced (it does not call AttentionInterface)",
        "LlamaForCausalLM cannot attend by sdpa, which attends to the prompt on the model's device",
        "LlamaForCausalLM is an encoder-decoder: only decoders are served",
        "LlamaForCausalLM has cross-attention, to what is not in its cache",
        "LlamaForCausalLM has layers of several shapes (per_layer_config)",
        "LlamaForCausalLM takes no cache: it generates without one",
        "LlamaAttention attends to later tokens, which drives do not support",
        "LlamaAttention attends twice to keys that it caches once, which drives do not support",
        "layer 0 caches keys of 1 heads x 16 channels; drives serve 4 x 16",
        "an attention mask of torch.float32: only boolean padding masks are supported",
        "the model did not pass the cached keys of layer 0 to its attention unchanged",
        "LlamaForCausalLM has no num_hidden_layers and no num_attention_heads in its config",
        "it is Tuesday",
    ],
)
def test_served_model_confirms_no_refusal_reason(reason):
    ids = torch.arange(10, 30)[None]
    with torch.inference_mode():
        assert not confirmed(reason, build("llama", 1.0), ids)


def test_slightly_wrong_attention_is_detected(monkeypatch):
    decode = attention._decode

    def scaled(layer, q, k, v, admitted):
        return decode(layer, 0.9 * q, k, v, admitted)

    monkeypatch.setattr(attention, "_decode", scaled)
    row = try_family("llama")
    assert row.outcome == "wrong" and "logits differ" in row.reason


def test_exception_in_attach_is_a_crash(monkeypatch):
    for place in ("placement", "vcsd.attach"):
        with monkeypatch.context() as patch:
            patch.setattr(f"vcsd_eval.accuracy.family.{place}", lambda *_, **__: 1 / 0)
            assert try_family("llama").outcome == "crashed"


def test_unbuildable_family_has_reason():
    row = try_family("blip")
    assert row.outcome == "not_built" and "pixel_values" in row.reason


def _die(name, sender, policy):
    if name == "late":
        time.sleep(60)
    if name == "dead":
        os.abort()
    sender.send(Row(name, "right"))


def test_sweep_continues_after_crash_or_timeout(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))  # the processes look there for this module
    monkeypatch.setattr(families, "_work", _die)
    dead, good = sweep(["dead", "good"], workers=2, limit_s=HANG_S)
    assert (dead.outcome, dead.reason) == ("crashed", "its process ended with -6")
    assert good.outcome == "right"
    (late,) = sweep(["late"], workers=1, limit_s=2)
    assert (late.outcome, late.reason) == ("crashed", "did not end within 2 s")


def test_families_as_json_and_as_page(monkeypatch, tmp_path):
    rows = [Row("llama", "right", difference=1e-4, control=0.5), Row("bert", "refused", "it is Tuesday", "Bert", False)]
    monkeypatch.setattr(families, "sweep", lambda *_: rows)
    outcome = experiment(names="llama,bert", page=tmp_path / "page.md")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert lines[-2:] == ["| llama | right | 1.0e-04 | 5.0e-01 |  |", "| bert | refused |  |  | it is Tuesday |"]
    assert outcome.result == {
        "right": 1,
        "refused": 1,
        "not_built": 0,
        "wrong": 0,
        "crashed": 0,
        "rows": [asdict(row) for row in rows],
    }
    assert outcome.failed and "bert" in outcome.notes[0]
    with pytest.raises(ValueError, match="names = nonsense"):
        experiment(names="nonsense")
    with pytest.raises(ValueError, match="policy = 'in-storage': must be one of reactive"):
        experiment(policy="in-storage")
    with pytest.raises(ValueError, match="--markdown-out is for drives only"):
        experiment(policy="auto", page=tmp_path / "page.md")


def test_family_list_has_every_model_once():
    names = architectures()
    assert len(names) == len(set(names))
    assert {"llama", "qwen2_vl"} <= set(names)
    assert max(family.PADDED) < family.PROMPT
