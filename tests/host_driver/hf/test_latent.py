"""Latent attention in drives: one row a token, and outputs as the model's own."""

from contextlib import closing

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import vcsd
from csd_firmware import InProcessDevice
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.view import in_flash
from host_driver.hf.latent import Latent, in_latent_space, latent_modules

RANK, ROTARY, HEADS = 512, 64, 4
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY}
SIZES |= {"qk_nope_head_dim": 32, "v_head_dim": 24, "q_lora_rank": 16, "max_position_embeddings": 512}
SIZES |= {"moe_intermediate_size": 32, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
FP16_ERROR = 5e-3


def deepseek_v2():
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, n_shared_experts=1, first_k_dense_replace=1))


def deepseek_v3():
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, n_shared_experts=1, first_k_dense_replace=1))


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def made(make):
    model = make().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(2)
    return model


def talk(model):
    """A padded batch, token by token, cropped, and a second turn: logits of all that are tokens."""
    ids, mask = torch.randint(3, 97, (3, 100), generator=torch.Generator().manual_seed(1)), torch.ones(3, 100).long()
    mask[1, :13], mask[2, :27] = 0, 0
    logits, at, cache = [], 0, None
    for length in (40, *[1] * 12, -5, 20, *[1] * 3):
        if length < 0:
            cache.crop(length)
            at += length
            continue
        positions = (mask[:, : at + length].cumsum(1) - 1).clamp(min=0)[:, at:]
        given = {"attention_mask": mask[:, : at + length], "position_ids": positions, "past_key_values": cache}
        out = model(input_ids=ids[:, at : at + length], use_cache=True, **given)
        cache = out.past_key_values
        logits.append(out.logits[mask[:, at : at + length].bool()])
        at += length
    return torch.cat(logits)


@pytest.mark.parametrize("make", [deepseek_v2, deepseek_v3])
@pytest.mark.parametrize("method", ["dense", "sparf"])
def test_models_equal_their_own_attention(make, method):
    model = made(make)
    expected = talk(model)
    with vcsd.attach(model, attention=method, compression=1):
        assert (talk(model) - expected).abs().max() < FP16_ERROR
    assert torch.equal(talk(model), expected)


def test_a_token_takes_one_row_and_the_layouts_own_copy():
    """K of 576 channels in pages of 3 rows, and what is copied of it for SparF; V takes nothing."""
    model, tokens = made(deepseek_v3), 300
    spec = INSTCSD_ZYNQ7045_8CH
    with closing(InProcessDevice(spec)) as device, vcsd.attach(model, [device], attention="dense") as csd:
        kept = model(torch.randint(3, 97, (1, tokens)), use_cache=True)
        (seq,) = device.firmware.ftl.sequences.values()
        assert set(seq.maps) == {"k", "embedding_k"}
        k, copy = seq.maps["k"], seq.maps["embedding_k"]
        row = (RANK + ROTARY) * 2
        assert k.per_group == spec.geometry.page_bytes // row
        assert k.streams == 1
        assert in_flash(k.slots[:, :, : tokens // k.per_group]).all()
        assert copy.streams == -(-(RANK + ROTARY) // copy.channels)  # of the same rows, in another order
        assert kept.past_key_values.get_seq_length() == tokens
        assert csd.driver.shape.kv_bytes_per_token == SIZES["num_hidden_layers"] * row


def test_dense_reads_each_row_once():
    model = made(deepseek_v3)
    pages = {}
    for lone in ("dense", "local"):
        with vcsd.attach(model, attention=lone, compression=1) as csd:
            out = model(torch.randint(3, 97, (1, 300)), use_cache=True)
            model(torch.tensor([[5]]), past_key_values=out.past_key_values)
            pages[lone] = csd.report().pages_read
    assert pages["dense"] == SIZES["num_hidden_layers"] * 100


def test_absorbed_attention_is_the_expanded_one():
    model = made(deepseek_v3)
    module = latent_modules(model)[0]
    with in_latent_space(model):
        rows, query = torch.randn(2, 1, 50, RANK + ROTARY), torch.randn(2, HEADS, 1, 32 + ROTARY)
        latent = Latent(module, rows)
        keys, values = latent.expand(rows)
        weights = (query @ keys.transpose(2, 3) * 0.05).softmax(-1)
        absorbed = (latent.queries(query) @ rows.transpose(2, 3) * 0.05).softmax(-1)
        torch.testing.assert_close(absorbed, weights, rtol=1e-3, atol=1e-5)
        out = latent.outputs((absorbed @ rows).transpose(1, 2))
        torch.testing.assert_close(out, (weights @ values).transpose(1, 2), rtol=1e-3, atol=1e-4)
    assert "expand_kv" not in vars(module)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": "ours"}, "use layout 16"),
        ({"storage": "bf16"}, "stored in FP16"),
        ({"drives": 2}, "1 KV heads"),
    ],
)
def test_what_one_latent_stream_does_not_have_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason), vcsd.attach(made(deepseek_v3), **options):
        pass
