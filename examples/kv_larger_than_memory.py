"""A KV cache that is larger than its memory: most blocks are in files, and the tokens stay the same.

Run `python examples/kv_larger_than_memory.py [MODEL_FOLDER]`.
"""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vcsd

folder = sys.argv[1] if len(sys.argv) > 1 else str(files("vcsd") / "shipped" / "checkpoint")
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("Once upon a time there was a little dog. " * 40, return_tensors="pt")
options = {"max_new_tokens": 16, "do_sample": False}
expected = model.generate(**inputs, **options)

with tempfile.TemporaryDirectory() as directory:
    limits = vcsd.TierLimits(device=2 << 20, host=1 << 20, files=Path(directory))  # bytes of the KV cache
    with vcsd.attach(model, policy="auto", tiers=limits) as run:
        tokens = model.generate(**inputs, **options)
        print(run.report())

print("same tokens as without tiers:", torch.equal(tokens, expected))
