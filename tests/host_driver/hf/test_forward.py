"""Every source of the cache and every form of the forward call: correct, or refused with the reason."""

import copy
import pickle

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    QuantizedCache,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StaticCache,
)
from transformers.generation.configuration_utils import CompileConfig

import vcsd
from vcsd import UnsupportedModelError
from vcsd.generate import generate

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FP16_ERROR = 5e-3  # logits are of order 1


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def make(model_class, config):
    """A model with random weights large enough for attention that is not flat."""
    model = model_class(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(2)
    return model


@pytest.fixture
def model():
    return make(LlamaForCausalLM, LlamaConfig(**LLAMA))


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 40))


def turns(model, ids, cache):
    """Prompt, then one token, several, and one: logits after the prompt, in a cache that the caller keeps."""
    model(ids, cache=cache)
    cuts = (0, 1), (1, 9), (9, 10)
    out = [model(ids[:, first:end], cache=cache).logits for first, end in cuts]
    assert cache.get_seq_length() == 50
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    "empty",
    [
        lambda config: DynamicCache(),
        lambda config: DynamicCache(config=config),
        lambda config: StaticCache(config=config, max_cache_len=64),
    ],
)
def test_cache_of_caller_is_filled_in_place(model, ids, empty):
    expected = turns(model, ids, empty(model.config))
    with vcsd.attach(model, drives=2, method="dense") as csd:
        got = turns(model, ids, empty(model.config))
        assert csd.report().drives.steps == 2
    assert (got - expected).abs().max() < FP16_ERROR


def test_output_refers_to_given_cache(model, ids):
    with vcsd.attach(model, method="dense"):
        cache = DynamicCache()
        assert model(ids, cache=cache).cache is cache
        assert model(ids[:, :1], cache=cache).cache is cache
        assert model(ids[:, :1], cache=cache, return_dict=False)[1] is cache
        cache.crop(-2)
        assert cache.get_seq_length() == 40
        cache.reset()
        assert model(ids, cache=cache).cache.get_seq_length() == 40


def test_dropping_callers_cache_frees_drives(model, ids):
    with vcsd.attach(model) as csd:
        cache = DynamicCache()
        model(ids, cache=cache)
        (device,) = csd.driver.devices
        assert len(device.firmware.ftl.sequences) == 2
        del cache
        assert not device.firmware.ftl.sequences


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_generate_with_either_kind_of_cache_is_not_compiled(model, ids, options):
    compiling = CompileConfig(backend="eager")
    compiling._compile_all_devices = True
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "compile_config": compiling} | options
    expected = model.generate(ids, **options)
    with vcsd.attach(model, method="dense") as csd:
        assert torch.equal(model.generate(ids, **options), expected)
        assert csd.report().drives.steps == 7


def test_compiled_models_attend_in_drives(model, ids):
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected, _ = generate(model, inputs, 6, None)
    wrapped = torch.compile(model, backend="eager")
    wrapped(ids)
    with vcsd.attach(wrapped, method="dense") as csd:
        assert torch.equal(generate(wrapped, inputs, 6, None)[0], expected)
        cache = DynamicCache()
        wrapped(ids, cache=cache)
        wrapped(ids[:, :1], cache=cache)
        assert csd.report().drives.steps == 6
    before = copy.deepcopy(model)
    before.compile(backend="eager")
    with vcsd.attach(before, method="dense") as csd:
        assert torch.equal(generate(before, inputs, 6, None)[0], expected)
        assert csd.report().drives.steps == 5
    assert before._compiled_call_impl is not None
    with vcsd.attach(model, method="dense") as csd:
        model.compile(backend="eager")
        assert torch.equal(generate(model, inputs, 6, None)[0], expected)
        assert csd.report().drives.steps == 5


def test_a_model_with_compiled_parts_is_refused(model):
    model.model = torch.compile(model.model, backend="eager")
    with pytest.raises(UnsupportedModelError, match="model is compiled separately"), vcsd.attach(model):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_attention_twice_for_one_update_is_refused(ids):
    model = make(DiffLlamaForCausalLM, DiffLlamaConfig(**LLAMA))
    cache = DynamicCache()
    with vcsd.attach(model), pytest.raises(UnsupportedModelError, match="twice"):
        model(ids, cache=cache)
    assert model(ids, cache=cache).cache.get_seq_length() == 40  # it was left as it was


def test_multi_axis_positions_are_split_by_batch():
    text = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    model = make(Qwen2VLForConditionalGeneration, Qwen2VLConfig(text_config=text, vision_config=vision))
    for batch in (2, 3):
        ids = torch.randint(3, 97, (batch, 30))
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        tokens, logits = generate(model, inputs, 6, None)
        with vcsd.attach(model, method="dense", micro_batches=2):
            assert torch.equal(generate(model, inputs, 6, None)[0], tokens)
            cache = DynamicCache()
            positions = (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)
            model(ids, attention_mask=mask, position_ids=positions, cache=cache)
            mask = torch.cat([mask, mask[:, -1:]], 1)
            step = {"attention_mask": mask, "position_ids": positions[:, :, -1:] + 1, "cache": cache}
            got = model(tokens[:, :1], **step).logits[:, -1]
        assert (got - logits[1]).abs().max() < FP16_ERROR


def test_cache_in_drives_cannot_be_copied_or_shared(model, ids):
    other = copy.deepcopy(model)
    with vcsd.attach(model):
        cache = DynamicCache()
        model(ids, cache=cache)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedModelError, match="cannot be copied"):
                copied(cache)
        for foreign in (other, model.model):
            with pytest.raises(UnsupportedModelError, match=r"to the model that vcsd\.attach was given"):
                foreign(ids[:, :1], cache=cache)
        with vcsd.attach(other), pytest.raises(UnsupportedModelError, match="another session"):
            other(ids[:, :1], cache=cache)
    with vcsd.attach(model), pytest.raises(UnsupportedModelError, match="another session"):
        model(ids[:, :1], cache=cache)


def test_other_kinds_of_caches_are_refused(model, ids):
    quantized = object.__new__(QuantizedCache)  # its own parts need packages of their own
    with vcsd.attach(model):
        with pytest.raises(UnsupportedModelError, match="QuantizedCache"):
            model(ids, cache=quantized)
        with pytest.raises(UnsupportedModelError, match="tuple"):
            model(ids, cache=((ids, ids),))


def test_cache_refused_after_failed_forward(model, ids):
    cache = DynamicCache()
    with vcsd.attach(model):
        model(ids, cache=cache)
        hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], cache=cache)
        hook.remove()
        with pytest.raises(UnsupportedModelError, match="failed half way"):
            model(ids[:, :1], cache=cache)
        cache.reset()
        model(ids, cache=cache)


def test_second_model_with_same_config_is_refused(model):
    with vcsd.attach(model):
        with (
            pytest.raises(UnsupportedModelError, match="shares its config"),
            vcsd.attach(LlamaForCausalLM(model.config)),
        ):
            pass
        with (
            pytest.raises(UnsupportedModelError, match="attached already, with the KV cache in drives"),
            vcsd.attach(model),
        ):
            pass
