"""llama.cpp on our models' weights: refused models, and equality of the model."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vcsd_eval.baselines import llamacpp
from vcsd_eval.baselines.llamacpp import KINDS, LlamaCpp, difference, expected, kinds_of, missing
from vcsd_eval.bench.decode import DecodeLoad, bench_decode


@pytest.fixture
def installed():
    if not llamacpp.installed():
        pytest.skip("llama-cpp-python and gguf are not installed: pip install 'vcsd[baselines]'")


def llama(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**{"max_position_embeddings": 2048, **sizes, **heads, **fields})).eval()


def test_skipped_comparison_has_reason(monkeypatch):
    plain = {"model_type": "llama", "hidden_act": "silu", "rope_parameters": {"rope_type": "default"}}
    monkeypatch.setattr(llamacpp, "find_spec", lambda name: None)
    assert "pip install 'vcsd[baselines]'" in missing(SimpleNamespace(config=SimpleNamespace(**plain)), 1024)
    monkeypatch.setattr(llamacpp, "find_spec", lambda name: name)
    for fields, tokens, reason in (
        ({}, 1024, None),
        ({}, 8193, "more than 8,192 tokens"),
        ({"model_type": "mistral"}, 1024, "these are mistral's"),
        ({"hidden_act": "gelu"}, 1024, "only Llama's"),
        ({"rope_parameters": {"rope_type": "yarn"}}, 1024, "only Llama's"),
    ):
        said = missing(SimpleNamespace(config=SimpleNamespace(**plain | fields)), tokens)
        assert said is reason or reason in said


def test_cache_dtype_follows_model_dtype():
    assert list(kinds_of(torch.float32)) == list(KINDS)
    assert list(kinds_of(torch.bfloat16)) == ["llama.cpp, fp16", "llama.cpp, fp16, flash"]


def test_rotated_channel_pairs_are_adjacent():
    halves = torch.arange(2 * 8).reshape(16, 1)
    assert llamacpp._in_pairs(halves, 2).flatten().tolist() == [
        *(0, 4, 1, 5, 2, 6, 3, 7),
        *(8, 12, 9, 13, 10, 14, 11, 15),
    ]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"rms_norm_eps": 0.1}])
@torch.inference_mode()
def test_llamacpp_logits_equal_model(name, fields):
    model, ids = llama(**fields), torch.arange(2 * 700).reshape(2, 700) % 63
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter)
    rival = LlamaCpp(model, 701, 2, 1, KINDS[name])
    assert difference(rival, ids, expected(model, ids)) < KINDS[name].differs(torch.float32)
    rival.close()


@pytest.mark.usefixtures("installed")
@torch.inference_mode()
def test_wrong_weight_order_is_detected(monkeypatch):
    model, ids = llama(), torch.arange(40).reshape(1, 40)
    monkeypatch.setattr(llamacpp, "_in_pairs", lambda rows, heads: rows)
    rival = LlamaCpp(model, 41, 1, 1, KINDS["llama.cpp, fp16"])
    assert difference(rival, ids, expected(model, ids)) > KINDS["llama.cpp, fp16"].differs(torch.bfloat16)
    rival.close()


@pytest.mark.usefixtures("installed")
def test_decode_bench_times_llamacpp():
    result = bench_decode(DecodeLoad("4x2x32", tokens=40, steps=1, repeats=1))
    cpu = result["step_cpu_ms"]
    assert set(KINDS) <= set(cpu) and set(result["llamacpp_logit_differences"]) == set(KINDS)
    assert result["dense_over_llamacpp"] == cpu["dense"] / cpu[result["fastest_llamacpp_cache"]]
    assert cpu[result["fastest_llamacpp_cache"]] == min(cpu[name] for name in KINDS)
