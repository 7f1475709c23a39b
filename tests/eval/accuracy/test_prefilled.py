"""Prompts that are prefilled once, of a model with windows: each use leaves the cache as it was.

partner of: eval/accuracy/prefilled.py
"""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import vcsd
from vcsd_eval.accuracy.prefilled import HostPrefill

FP16_ERROR = 5e-3


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2, sliding_window=16, layer_types=kinds)
    return Gemma3ForCausalLM(config).eval()


@torch.inference_mode()
def test_prompts_longer_than_a_window_are_used_again(model):
    prompts = [torch.randint(3, 97, (length,)).tolist() for length in (40, 33)]
    tokens = [5, 6, 7, 8]
    expected = [
        torch.log_softmax(model(torch.tensor([prompt + tokens[:-1]])).logits[0, -4:].float(), -1) for prompt in prompts
    ]
    host = HostPrefill(model, prompts)
    for _ in range(2):
        for row in range(2):
            assert (host.force(row, tokens) - expected[row]).abs().max() < 1e-4
    with vcsd.attach(model, drives=2, method="dense") as csd:
        prefilled = host.in_drives(csd)
        for _ in range(2):
            logits = []

            def choose(step, row_logits, logits=logits):
                logits.append(row_logits)
                return torch.tensor([tokens[step]] * 2) if step < 3 else None

            prefilled.decode(4, choose)
            got = torch.log_softmax(torch.stack(logits, 1), -1)
            assert (got - torch.stack(expected)).abs().max() < FP16_ERROR
