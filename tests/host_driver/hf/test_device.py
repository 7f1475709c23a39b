"""Caps, sinks and slopes on the model's device, and in drives."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

import vcsd
from host_driver.hf.device import ROWS, attend_on_device

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"intermediate_size": 64, "num_hidden_layers": 4, "sliding_window": 32, "max_position_embeddings": 512}
FP16_ERROR = 5e-3


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_logit_softcapping=0.5, query_pre_attn_scalar=7))


def gpt_oss():
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=2))
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.copy_(torch.linspace(0, 4, 4))
    return model


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_models_with_caps_and_sinks_equal_their_own_attention(make):
    model = make().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(4)
    ids, mask = torch.randint(3, 97, (3, 50)), torch.ones(3, 50, dtype=torch.long)
    mask[1, :20] = 0
    options = {"max_new_tokens": 30, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**options)
    with vcsd.attach(model, drives=2, method="dense") as csd:
        got = model.generate(**options)
        terms = [term.copy() for term in csd.driver.terms.values()]
        csd.driver.terms.clear()
        plain = csd.report().drives.link_bytes_per_step
    assert len(terms) == 2 and plain > 0
    difference = max(float((a - b).abs().max()) for a, b in zip(expected.logits, got.logits, strict=True))
    assert torch.equal(got.sequences, expected.sequences)
    assert difference < FP16_ERROR


def straight(q, k, v, cap, sinks, slopes):
    """One query row after the other, in float64."""
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=torch.float64)
    past, group = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = past + i + 1
                logits = 0.3 * k[b, h // group, :seen].double() @ q[b, h, i].double()
                logits = cap * torch.tanh(logits / cap) - slopes[h] * torch.arange(seen - 1, -1, -1)
                weights = torch.cat([logits, sinks[h : h + 1].double()]).softmax(0)[:-1]
                out[b, i, h] = weights @ v[b, h // group, :seen].double()
    return out


@pytest.mark.parametrize("past", [0, 5])
def test_device_attention_equals_float64(past):
    new = ROWS + 3
    q, k, v = torch.randn(1, 4, new, 8), torch.randn(1, 2, past + new, 8), torch.randn(1, 2, past + new, 6)
    sinks, slopes = torch.randn(4), torch.rand(4) / 10
    asked = {"scaling": 0.3, "softcap": 2.0, "s_aux": sinks, "slopes": slopes}
    out = attend_on_device(torch.nn.Module(), q, k, v, None, asked)
    torch.testing.assert_close(out.double(), straight(q, k, v, 2.0, sinks, slopes), rtol=1e-4, atol=1e-5)


def test_fully_masked_row_gives_no_nan():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None].clone()
    mask[..., :2] = False
    assert attend_on_device(torch.nn.Module(), q, k, k, mask, {"s_aux": torch.zeros(2)}).isfinite().all()
