"""Prompts whose KV data of a layer exceeds a command, with the default slots of drives."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vcsd
from csd_link.window import WindowLayout

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_run_dir")]
HEADS, DIM, NEW = 8, 128, 4
PROMPT = WindowLayout().slot_bytes // (4 * HEADS * DIM) + 9  # tokens


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=2 * PROMPT,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def two_turns(model, transport):
    """Generated tokens of each turn, and the report; the second turn reads the KV cache back."""
    generator = np.random.default_rng(0)
    prompt, turn = (torch.from_numpy(generator.integers(0, 512, (1, tokens))) for tokens in (PROMPT, 30))
    asked = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    with vcsd.attach(model, drives=1, method="dense", transport=transport) as csd:
        first = model.generate(input_ids=prompt, **asked)
        ids = torch.cat([first.sequences, turn], dim=1)
        second = model.generate(input_ids=ids, cache=first.cache, **asked)
        report = csd.report().to_dict()
    return second.sequences[0, PROMPT:].tolist(), report


@pytest.fixture(scope="module")
def expected(model):
    return two_turns(model, "inproc")


@pytest.mark.parametrize("transport", ["process", "fuse", "window:{}/windows"])
def test_long_prompts_equal_on_all_transports(model, expected, transport, tmp_path, request):
    if transport == "fuse":
        request.getfixturevalue("fuse")
    assert len(expected[0]) == NEW + 30 + NEW
    assert two_turns(model, transport.format(tmp_path)) == expected
