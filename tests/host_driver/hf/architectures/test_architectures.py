"""Every decoder architecture of transformers, tiny and with random weights: served correctly, or refused for a true
reason. A sample of them always, all with --long.
"""

import pytest
import torch
import transformers

import vcsd
from host_driver.hf import attention
from host_driver.hf.cache import KvLayer
from kv_cache.limits import TierLimits
from tests.host_driver.hf.architectures import comparison, page
from tests.host_driver.hf.architectures.comparison import try_family
from tests.host_driver.hf.architectures.refusals import confirmed
from tests.host_driver.hf.architectures.tiny import WINDOW, architectures, build

MIXED = ("gemma2", "gpt_oss", "qwen3_next", "llama4_text", "gemma3_text")
SERVED = (*MIXED, "llama", "gpt2", "opt", "bart", "roberta", "mixtral", "phi3", "gpt_bigcode", "qwen2_vl")
IN_TIERS = ("llama", "bart", "deepseek_v3", "diffllama", "paligemma", "gpt_oss", "cpmant")
OUTCOMES = {row["name"]: (row["outcome"], row["reason"]) for row in page.recorded()["rows"]}


@pytest.fixture
def few_steps(monkeypatch):
    """Half of the steps of a long run, still more than a window has."""
    monkeypatch.setattr(comparison, "NEW", WINDOW + 4)


@pytest.mark.long
@pytest.mark.parametrize("name", architectures())
def test_architecture_has_recorded_outcome(name):
    transformers.logging.set_verbosity_error()
    row = try_family(name)
    page.leave(row)
    assert row.outcome not in ("wrong", "crashed"), row.reason
    assert row.outcome != "refused" or row.reason_checked, row.reason
    if page.recorded()["transformers"] == transformers.__version__:
        assert (row.outcome, row.reason) == OUTCOMES[name]


def test_page_has_recorded_result():
    assert page.page(page.recorded()) == page.PAGE.read_text()
    assert {outcome for outcome, _ in OUTCOMES.values()} == {"right", "refused", "not_built"}


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", SERVED)
def test_served_family_is_right(name):
    row = try_family(name)
    assert (row.outcome, row.reason) == ("right", "") == OUTCOMES[name]
    assert 0 < row.difference < row.control / 4
    assert row.tokens_equal > 0.9


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("name", "policy"), [*zip(IN_TIERS, ["dual-blade", "reactive"] * 4, strict=False), ("llama", "reactive")]
)
def test_served_family_in_tiers_is_bit_exact(name, policy):
    row = try_family(name, policy)
    assert (row.outcome, row.reason) == ("right", "")
    assert row.difference == 0 < row.control


def test_lost_bit_in_tiers_is_detected(monkeypatch):
    on_device = KvLayer._on_device

    def flipped(layer, keys, values):
        k, v = on_device(layer, keys, values)
        if layer.index == 1 and layer.length > 42:
            k[0, 0, 3, 0] *= 1 + 2.0**-12
        return k, v

    monkeypatch.setattr(KvLayer, "_on_device", flipped)
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
    decode = attention._Attention._in_drives

    def scaled(self, call, query, key, value):
        return decode(self, call, 0.9 * query, key, value)

    monkeypatch.setattr(attention._Attention, "_in_drives", scaled)
    row = try_family("llama")
    assert row.outcome == "wrong" and "logits differ" in row.reason


def test_exception_in_attach_is_a_crash(monkeypatch):
    for place in ("placement", "vcsd.attach"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tests.host_driver.hf.architectures.comparison.{place}", lambda *_, **__: 1 / 0)
            assert try_family("llama").outcome == "crashed"


def test_unbuildable_family_has_reason():
    row = try_family("blip")
    assert row.outcome == "not_built" and "pixel_values" in row.reason


def test_family_list_has_every_model_once():
    names = architectures()
    assert len(names) == len(set(names))
    assert {"llama", "qwen2_vl"} <= set(names)
    assert max(comparison.PADDED) < comparison.PROMPT
