"""Attention of a Hugging Face model in two emulated drives: `python examples/attach_in_3_lines.py [MODEL_FOLDER]`."""

import sys
from importlib.resources import files

from transformers import AutoModelForCausalLM, AutoTokenizer

import vcsd

folder = sys.argv[1] if len(sys.argv) > 1 else str(files("vcsd") / "shipped" / "checkpoint")
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("Once upon a time there was a little dog. " * 20, return_tensors="pt")

with vcsd.attach(model, drives=2, method="sparf", compression=8) as csd:
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    print(csd.report())

print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :]))
