"""Models in which only some layers attend to everything: those are in drives, the others keep their own cache."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
)

import vcsd

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 512}
WINDOW = 32
FP16_ERROR = 5e-3  # of logits of order 1, as in test_cache.py


def qwen3():
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=3, **windows))


def gemma3():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=4, sliding_window=WINDOW, layer_types=kinds)
    return Gemma3ForCausalLM(config)


def qwen3_next():
    states = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
    states |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 2, "num_experts_per_tok": 2}
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **states, **sizes))


def mimo():
    """V of 8 channels, K of 16; windows have sinks and twice as many KV heads."""
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "v_head_dim": 8}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    return MiMoV2FlashForCausalLM(
        MiMoV2FlashConfig(**SIZES, **experts, num_hidden_layers=3, sliding_window=WINDOW, layer_types=kinds)
    )


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def made(make):
    model = make()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(2)  # so that attention is not flat
    return model.eval()


def talk(model, cache=None):
    """A padded batch of three beyond the window, token by token, and a second turn: logits of all that are tokens."""
    ids, mask = torch.randint(3, 97, (3, 100), generator=torch.Generator().manual_seed(1)), torch.ones(3, 100).long()
    mask[1, :13], mask[2, :27] = 0, 0
    logits, at = [], 0
    for length in (40, *[1] * 30, 20, *[1] * 10):
        positions = (mask[:, : at + length].cumsum(1) - 1).clamp(min=0)[:, at:]
        given = {"attention_mask": mask[:, : at + length], "position_ids": positions, "cache": cache}
        out = model(input_ids=ids[:, at : at + length], use_cache=True, **given)
        cache = out.cache
        logits.append(out.logits[mask[:, at : at + length].bool()])
        at += length
    return torch.cat(logits)


@pytest.mark.parametrize("make", [qwen3, gemma3, qwen3_next, mimo])
@pytest.mark.parametrize("drives", [1, 2])
def test_layers_in_drives_and_host_equal_models_own(make, drives):
    model = made(make)
    expected = talk(model)
    with vcsd.attach(model, drives=drives, method="dense", micro_batches=2) as csd:
        assert (talk(model) - expected).abs().max() < FP16_ERROR
        layers = csd.report().to_dict()["layers"]
    kinds = model.config.layer_types
    assert layers["in_drives"] == [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    assert sum(map(len, layers["with_model"].values())) == len(kinds) - len(layers["in_drives"])


@pytest.mark.parametrize("make", [qwen3, gemma3])
def test_a_cache_of_fixed_size_keeps_its_windows(make):
    model = made(make)
    expected = talk(model)
    with vcsd.attach(model, method="dense"):
        assert (talk(model, StaticCache(config=model.config, max_cache_len=200)) - expected).abs().max() < FP16_ERROR


def test_narrow_v_is_padded_and_costs_as_much_as_k():
    """With a selection as well; results are compared with the model's own."""
    model = made(mimo)
    expected = talk(model)
    with vcsd.attach(model, method="sparf", compression=1) as csd:
        assert (talk(model) - expected).abs().max() < FP16_ERROR
        report = csd.report().drives
    assert (csd.driver.shape.head_dim, csd.driver.shape.v_head_dim) == (16, 8)
    assert report.token_bytes["k"] == report.token_bytes["v"] == 2 * 16 * 2
    assert csd.driver.shape.kv_bytes_per_token == 2 * 2 * (16 + 8) * 2


def test_fraction_in_drives_grows_with_context():
    with vcsd.attach(made(qwen3)) as csd:
        report = csd.report().drives
    assert report.kv_share(WINDOW) == pytest.approx(1 / 3)
    assert report.kv_share(4 * WINDOW) == pytest.approx(4 / 6)
    assert "sliding_attention" in str(report)


def test_crop_equals_models_own_cache():
    model = made(qwen3)
    ids = torch.randint(3, 97, (2, 60))

    def cropped(cache, length, removed):
        model(ids[:, :length], cache=cache)
        cache.crop(-removed)
        return model(ids[:, length - removed : length + 5], cache=cache).logits

    expected = cropped(DynamicCache(config=model.config), 20, 5)
    with vcsd.attach(model, method="dense"):
        assert (cropped(DynamicCache(config=model.config), 20, 5) - expected).abs().max() < FP16_ERROR
        with pytest.raises(RuntimeError, match="does not track past states"):
            cropped(DynamicCache(config=model.config), 50, 5)


def test_model_with_only_windows_is_refused():
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=2, **windows))
    with pytest.raises(vcsd.UnsupportedModelError, match="nothing is for drives"), vcsd.attach(model):
        pass


def test_cache_after_failed_batch_selection_is_refused():
    model = made(gemma3)
    with vcsd.attach(model, method="dense"):
        cache = model(torch.randint(3, 97, (2, 20)), use_cache=True).cache
        with pytest.raises(vcsd.UnsupportedModelError, match="beam search"):
            cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(vcsd.UnsupportedModelError, match="start a new cache"):
            model(torch.tensor([[5], [6]]), cache=cache)
