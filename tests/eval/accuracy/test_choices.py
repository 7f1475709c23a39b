"""Recorded attention, and the tokens that kernels choose on it, compared with the oracle's.

partner of: eval/accuracy/recorded.py
"""

import numpy as np
import pytest
import torch

from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy import choices
from vcsd_eval.accuracy.choices import compare_choices
from vcsd_eval.accuracy.recorded import TEXT, record


@pytest.fixture(scope="module")
def shipped():
    return load(CHECKPOINT)


def test_kernels_and_oracle_choose_the_same_tokens(shipped):
    ticks = []
    result = compare_choices(*shipped, TEXT.read_text(), 200, 3, 8, ticks.append)
    assert result["choices"] == 3 * 4 * 4  # steps, layers, KV heads
    assert result["equal"] + result["differing"] == result["choices"]
    assert result["differing_tokens_beyond_ties"] == 0
    assert len(ticks) == result["layers"] == 4


def test_difference_beyond_tie_is_counted(shipped, monkeypatch):
    def shifted(*arguments):
        return *sparf(*arguments)[:2], np.arange(arguments[4])

    sparf = choices.sparf
    monkeypatch.setattr(choices, "sparf", shifted)
    result = compare_choices(*shipped, TEXT.read_text(), 200, 1, 8)
    assert result["differing"] > 0
    assert result["differing_tokens_beyond_ties"] > 0


def test_text_of_invalid_length_is_refused(shipped):
    with pytest.raises(ValueError, match=r"the text has 5 tokens: tokens \+ steps = 103 are needed"):
        compare_choices(*shipped, "short", 100, 3, 8)
    with pytest.raises(ValueError, match="context is 4096"):
        compare_choices(*shipped, TEXT.read_text(), 4095, 3, 8)


def test_recorded_q_k_v_reproduce_the_attention(shipped):
    """Causal attention on the first layer's inputs, through its output projection and back into the model."""
    model, tokenizer = shipped
    ids = torch.tensor([tokenizer("A drive that can compute. " * 4)["input_ids"]])
    seen = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    layers = record(model, ids)
    hook.remove()
    q, k, v = (torch.from_numpy(part).float() for part in (layers[0].q, layers[0].k, layers[0].v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (out.transpose(1, 2).flatten(2) - seen[0]).abs().max() < 5e-3  # q, k and v were rounded to FP16
    assert len(layers) == model.config.num_hidden_layers
    assert model.config._attn_implementation == "sdpa"
