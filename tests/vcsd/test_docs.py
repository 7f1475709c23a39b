"""What the documentation shows works as it stands."""

import re
from pathlib import Path

import torch

import vcsd
from attention_engine import METHODS
from vcsd.generate import CHECKPOINT, load

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_a_method_runs_in_drives():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "methods.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) < 40
    exec(compile(code, "strided.py", "exec"), {})
    try:
        model, tokenizer = load(CHECKPOINT)
        ids = torch.tensor([tokenizer("A drive that can compute. " * 20)["input_ids"]])
        with vcsd.attach(model, drives=2, attention="strided", compression=2) as csd:
            out = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert csd.report().pages_read > 0
        assert out.shape[1] == ids.shape[1] + 4
    finally:
        del METHODS["strided"]


def test_every_method_is_described():
    text = (DOCS / "methods.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in text] == []
