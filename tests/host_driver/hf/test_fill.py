"""Caches of plain transformers copied into drives: the same bytes and tokens as after a prefill with drives."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GptOssConfig, GptOssForCausalLM

import vcsd
from host_driver.hf import attention
from host_driver.hf.fill import can_fill, filled
from host_driver.hf.shape import UnsupportedModelError, placement
from tests.host_driver.hf.architectures.tiny import build
from vcsd.loading import CHECKPOINT, load

PROMPTS = [list(b"one, two, three, four, one, two, three,"), list(b"one, two,")]


@pytest.fixture(scope="module")
def shipped():
    return load(CHECKPOINT)[0]


def with_terms():
    """A model with a sink for each head, all of whose layers attend to everything."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, **heads, layer_types=["full_attention"] * 2, max_position_embeddings=256)
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2)
    return model


@torch.inference_mode()
def cached(model, prompt):
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([prompt]), cache=cache, use_cache=True)
    return cache


@torch.inference_mode()
def next_logits(model, cache, token=1):
    rows, length = len(cache.valid), cache.get_seq_length()
    mask = torch.cat([torch.from_numpy(cache.valid).long(), torch.ones(rows, 1, dtype=torch.long)], 1)
    positions = mask.sum(1, keepdim=True) - 1
    assert mask.shape[1] == length + 1
    ids = torch.full((rows, 1), token)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache).logits[:, -1]


def read(cache, layer):
    with cache.kv.drives.together(cache.requests) as (batch, rows):
        return cache.kv.drives.driver.read(batch, rows, layer)


def test_fill_stores_same_bytes_as_prefill(shipped):
    caches = [cached(shipped, prompt) for prompt in PROMPTS]
    with vcsd.attach(shipped, drives=2, method="dense", compression=1) as csd:
        cache = filled(shipped, csd.kv, csd.placed, caches)
        assert cache.valid.sum(1).tolist() == [len(prompt) for prompt in PROMPTS]
        alone = [cached(shipped, prompt).csd_cache for prompt in PROMPTS]
        for layer in range(4):
            result = read(cache, layer)
            wanted = [read(each, layer) for each in alone]
            for mine, theirs in zip(result, zip(*wanted, strict=True), strict=True):
                assert np.array_equal(mine, np.concatenate(theirs))


def test_filled_padded_sequences_decode_as_alone(shipped):
    caches = [cached(shipped, prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        wanted = torch.cat([shipped(input_ids=torch.tensor([[*prompt, 1]])).logits[:, -1] for prompt in PROMPTS])
    with vcsd.attach(shipped, drives=2, method="dense", compression=1) as csd:
        cache = filled(shipped, csd.kv, csd.placed, caches)
        first = next_logits(shipped, cache)
        cache.crop(-1)
        again = next_logits(shipped, cache)
    assert torch.equal(first, again)
    assert (first - wanted).abs().max() < 0.02
    assert torch.equal(first.argmax(-1), wanted.argmax(-1))


def test_fill_passes_terms_of_logits(monkeypatch):
    """Without the sinks the output would be another."""
    model = with_terms()
    caches = [cached(model, [5, 6, 7, 8] * 5)]
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([[5, 6, 7, 8] * 5 + [1]])).logits[:, -1]
    with vcsd.attach(model, drives=1, method="dense", compression=1) as csd:
        assert can_fill(model, csd.placed)
        cache = filled(model, csd.kv, csd.placed, caches)
        right = next_logits(model, cache)
        assert len(csd.driver.terms) == 2
        cache.crop(-1)
        csd.driver.terms.clear()
        monkeypatch.setattr(attention, "set_logit_terms", lambda *_: None)
        wrong = next_logits(model, cache)
    assert (right - wanted).abs().max() < 2e-3
    assert (wrong - wanted).abs().max() > 5 * (right - wanted).abs().max()


@pytest.mark.parametrize(("name", "can"), [("llama", True), ("gemma3_text", False), ("bloom", False)])
def test_can_fill_only_models_with_plain_caches(name, can):
    model = build(name, 1.0)
    assert can_fill(model, placement(model)) is can


def test_values_beyond_fp16_are_refused(shipped):
    cache = cached(shipped, PROMPTS[0])
    cache.layers[1].values = torch.full_like(cache.layers[1].values, 1e6)
    with (
        vcsd.attach(shipped, drives=1, method="dense", compression=1) as csd,
        pytest.raises(UnsupportedModelError, match="layer 1 has 1,000,000 in q, K or V"),
    ):
        filled(shipped, csd.kv, csd.placed, [cache])
