"""Models that do not use AttentionInterface, adapted to it: with odd heads and padding, and restored afterwards.

partner of: host_driver/hf/adapters/__init__.py, host_driver/hf/adapters/bloom.py, host_driver/hf/adapters/falcon.py,
host_driver/hf/adapters/gptj.py, host_driver/hf/adapters/mpt.py
"""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    MptConfig,
    MptForCausalLM,
)

import vcsd

FP16_ERROR = 5e-3
GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8}
MPT = {"vocab_size": 97, "d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 256}
FALCON = {"vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}


def falcon(**options):
    return FalconForCausalLM(FalconConfig(**FALCON, **options))


MADE = {
    "bloom, 6 heads": lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=96, n_layer=2, n_head=6)),
    "codegen": lambda: CodeGenForCausalLM(CodeGenConfig(**GPT)),
    "falcon, one KV head": falcon,
    "falcon, 2 of 6": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon, all": lambda: falcon(multi_query=False),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(**GPT)),
    "mpt, 6 heads": lambda: MptForCausalLM(
        MptConfig(vocab_size=97, d_model=96, n_heads=6, n_layers=2, max_seq_len=256)
    ),
}


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", MADE)
def test_adapted_models_equal_their_own_attention(name):
    model = MADE[name]().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(3)
    ids, mask = torch.randint(3, 97, (3, 50)), torch.ones(3, 50, dtype=torch.long)
    mask[1, :20] = 0
    options = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    expected = model.generate(**options)
    with vcsd.attach(model, method="dense") as csd:
        got = model.generate(**options)
        steps = csd.report().drives.steps
    again = model.generate(**options)
    assert steps == 19
    difference = max(float((a - b).abs().max()) for a, b in zip(expected.logits, got.logits, strict=True))
    assert difference < FP16_ERROR * max(1, float(expected.logits[0].abs().max()))
    assert all(torch.equal(a, b) for a, b in zip(expected.logits, again.logits, strict=True))


def test_few_kv_heads_are_stored_once():
    model = falcon(new_decoder_architecture=True, num_kv_heads=2).eval()
    with vcsd.attach(model) as csd:
        assert (csd.driver.shape.kv_heads, csd.driver.shape.q_heads) == (2, 6)


def test_alibi_in_bf16_is_refused():
    with pytest.raises(vcsd.UnsupportedModelError, match="ALiBi to BF16"), vcsd.attach(falcon(alibi=True)):
        pass


@pytest.mark.parametrize("name", ["bloom, 6 heads", "mpt, 6 heads"])
def test_padding_after_tokens_with_alibi_is_refused(name):
    model, ids = MADE[name]().eval(), torch.randint(3, 97, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, 10:14] = 0, 0
    with vcsd.attach(model, method="dense"):
        out = model(input_ids=ids[:, :10], attention_mask=mask[:, :10], use_cache=True)
        with pytest.raises(vcsd.UnsupportedModelError, match="pad on the left"):
            model(input_ids=ids[:, 10:], attention_mask=mask, cache=out.cache)
