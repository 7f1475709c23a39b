"""Recorded q, k and v reproduce the attention of the model."""

import torch

from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy.recorded import record


def test_recorded_q_k_v_reproduce_the_attention():
    """Causal attention on the first layer's inputs, through its output projection and back into the model."""
    model, tokenizer = load(CHECKPOINT)
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
