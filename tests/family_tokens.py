"""`python family_tokens.py`: tokens and logits of small random models of six families in drives, one JSON object.

`same.py` runs it in two trees, so it imports nothing from this tree's tests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

import vcsd

VOCABULARY, PROMPT_TOKENS, NEW_TOKENS = 97, 150, 12
GQA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GQA, head_dim=32)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**GQA, head_dim=16, attn_logit_softcapping=0.5, query_pre_attn_scalar=16)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4)),
}
METHODS = "dense", "sparf", "ours"
LIMITS = vcsd.TierLimits if "TierLimits" in vcsd.__all__ else vcsd.Tiers  # older revisions have other names
DRIVES: Any = 2
if "Session" in vcsd.__all__:
    SERVING, METHOD, BATCH = vcsd.ServingConfig, "method", "max_batch_size"
elif "DriveSetConfig" in vcsd.__all__:
    DRIVES, SERVING, METHOD, BATCH = vcsd.DriveSetConfig(count=2), vcsd.ServingConfig, "method", "max_batch_size"
else:
    DRIVES, SERVING, METHOD, BATCH = vcsd.DriveSet(count=2), vcsd.Serving, "attention", "slots"
POLICIES = "ours", "orbitflow", "tierkv"


def main() -> None:
    result = {name: tokens_of(make) for name, make in FAMILIES.items()}
    print(json.dumps(result))


@torch.inference_mode()
def tokens_of(make: Callable[[], Any]) -> dict[str, Any]:
    """Tokens, and a digest of the logits, by method in drives; tokens by policy of a server."""
    torch.manual_seed(0)
    model = make().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    ids = torch.randint(1, VOCABULARY, (2, PROMPT_TOKENS))
    attached: dict[str, Any] = {}
    served: dict[str, Any] = {}
    for method in METHODS:
        with vcsd.attach(model, drives=2, **{METHOD: method}):
            out = model.generate(
                ids, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        logits = torch.stack(out.logits).float().numpy().tobytes()
        attached[method] = {"tokens": out.sequences.tolist(), "logits": hashlib.sha256(logits).hexdigest()}
    for policy in POLICIES:
        tiers = LIMITS(device=1 << 20, host=4 << 20)
        serving = SERVING(policy=policy, tiers=tiers, drives=DRIVES, max_tokens=256, **{BATCH: 2})
        with vcsd.serve(model, serving, background=False) as server:
            streams = [server.submit(row.tolist(), max_new_tokens=NEW_TOKENS) for row in ids]
            served[policy] = [list(stream) for stream in streams]
    return {"attach": attached, "serve": served}


if __name__ == "__main__":
    main()
