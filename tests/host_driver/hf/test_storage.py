"""BF16 and 8-bit floats in drives: a model whose keys exceed FP16's range, and the stored values of any other model.

partner of: csd_spec/attention.py
"""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import vcsd
from csd_spec import LAYOUTS
from ftl import round_to_codec

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 512}
LARGE = 2.0**20  # of K, which q is divided by, so that logits are what they were
BF16_ERROR = 8 * 5e-3  # 8 bits where FP16 has 11, see test_cache.py


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def llama(layers=(), dtype=torch.float32):
    """A model whose keys in some layers are a million times as large."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(2)
    for number in layers:
        attention = model.model.layers[number].self_attn
        attention.k_proj.weight.mul_(LARGE)
        attention.q_proj.weight.div_(LARGE)
    return model.to(dtype)


def decode(model, tokens=60, **more):
    ids = torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, eos_token_id=None, **options, **more)
    return torch.stack(out.logits).float()


@pytest.mark.parametrize("method", ["dense", "sparf"])
@pytest.mark.parametrize("drives", [1, 2])
def test_keys_beyond_fp16_decode_right(drives, method):
    model = llama(layers=[1])
    expected = decode(model)
    with vcsd.attach(model, drives=drives, method=method, compression=1, kv_dtype="bf16"):
        assert (decode(model) - expected).abs().max() < BF16_ERROR


@pytest.mark.parametrize(("method", "layout"), [("sparf", "int8"), ("sparf", "int4"), ("kivi", "fp16"), ("ours", None)])
def test_low_bit_keys_beyond_fp16_equal_scaled_keys(method, layout):
    """To the bit, since the factor is a power of two; near the model's own where all tokens are attended."""
    expected, outputs = decode(llama(), 300), []  # of the same weights, as they are drawn again
    for layers in ([1], []):
        torch.manual_seed(0)
        options = {"method": method, "layout": layout, "compression": 1}
        with vcsd.attach(model := llama(layers), drives=2, kv_dtype="bf16", **options):
            outputs.append(decode(model, 300))
    assert torch.equal(*outputs) and (outputs[0] - expected).abs().max() < BF16_ERROR


class Rounded(DynamicCache):
    """Keeps 8-bit floats, as drives do; a prefill attends to the values before rounding."""

    FORM = LAYOUTS["fp8"].form(4096, 16, 512)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rows = (states.bfloat16().contiguous().view(torch.float16).numpy() for states in (key_states, value_states))
        stored = (torch.from_numpy(round_to_codec(self.FORM, row)).view(torch.bfloat16).float() for row in rows)
        joined = super().update(*stored, layer_idx, *args, **kwargs)
        return (key_states, value_states) if key_states.shape[2] == joined[0].shape[2] > 1 else joined


@pytest.mark.parametrize("method", ["dense", "sparf"])
@pytest.mark.parametrize("drives", [1, 2])
def test_fp8_storage_decodes_as_fp8_cache(drives, method):
    model = llama(layers=[1])
    expected = decode(model, cache=Rounded())
    assert (expected - decode(model)).abs().max() > BF16_ERROR  # so that rounding is seen
    with vcsd.attach(model, drives=drives, method=method, compression=1, kv_dtype="fp8") as csd:
        assert csd.driver.attention.layout == "fp8"
        assert (decode(model) - expected).abs().max() < BF16_ERROR


def test_fp16_storage_refuses_values_beyond_range():
    model = llama(layers=[1])
    with (
        vcsd.attach(model, kv_dtype="fp16"),
        pytest.raises(vcsd.UnsupportedModelError, match=r"layer 1 has \d+,\d+.*65,504"),
    ):
        decode(model)


def test_key_beyond_fp16_in_decode_refused():
    model = llama()
    with vcsd.attach(model, kv_dtype="fp16"):
        out = model(torch.arange(3, 40)[None], use_cache=True)
        model.model.layers[2].self_attn.k_proj.weight.mul_(LARGE)
        with pytest.raises(vcsd.UnsupportedModelError, match="layer 2 has"):
            model(torch.tensor([[5]]), cache=out.cache)


@pytest.mark.parametrize(("dtype", "bf16"), [(torch.bfloat16, True), (torch.float32, False), (torch.float16, False)])
def test_default_storage_is_dtype_of_model(dtype, bf16):
    with vcsd.attach(llama(dtype=dtype), method="dense") as csd:
        assert (csd.driver.attention.layout == "bf16") is bf16 is csd.driver.bf16
    for options in ({"method": "ours"}, {"layout": "int8"}):
        with vcsd.attach(llama(dtype=dtype), **options) as csd:
            assert csd.driver.bf16 is bf16 is csd.driver.attention.layout.endswith("-bf16")


def test_a_second_turn_and_crop_read_bf16_back():
    model, ids = llama(layers=[0]), torch.randint(3, 97, (2, 80))

    def talk():
        out = model(ids[:, :50], use_cache=True)
        for at in (50, 51):
            out = model(ids[:, at : at + 1], cache=out.cache)
        out.cache.crop(-5)
        first = model(ids[:, 47:70], cache=out.cache)
        return torch.cat([first.logits, model(ids[:, 70:71], cache=first.cache).logits], 1)

    expected = talk()
    with vcsd.attach(model, method="dense", kv_dtype="bf16"):
        assert (talk() - expected).abs().max() < BF16_ERROR


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_dtype": "fp16", "layout": "bf16"}, "layout bf16 stores bf16: use one of these"),
        ({"kv_dtype": "fp16", "layout": "progressive-bf16"}, "layout progressive-bf16 stores bf16"),
        ({"kv_dtype": "bf16", "layout": "fp8"}, "layout fp8 stores fp8"),
        ({"kv_dtype": "bf16", "layout": "plain"}, "layout plain stores fp16"),
        ({"kv_dtype": "fp8", "layout": "int8"}, "layout int8 stores fp16, bf16"),
        ({"kv_dtype": "fp8", "method": "ours"}, "layout progressive stores fp16, bf16"),
        ({"kv_dtype": "fp4"}, "must be 'fp16', 'bf16' or 'fp8'"),
        ({"kv_dtype": 16}, "kv_dtype: must be"),
    ],
)
def test_unknown_storage_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        vcsd.attach(llama(), **options)
