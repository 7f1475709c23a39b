"""The shipped checkpoint: its training corpus and its file format.

partner of: eval/model/corpus.py
"""

import ast
import random

import pytest
import torch

from vcsd.loading import CHECKPOINT, load
from vcsd_eval.model.corpus import Overlap, docstrings, load_corpus
from vcsd_eval.model.train_checkpoint import (
    HELD,
    LOST,
    MATCH,
    STAGES,
    TRUST,
    Stage,
    TrainingRun,
    batch,
    byte_tokenizer,
    learning_rate,
    new_model,
    schedule,
)

CORPUS = b" ".join(b"word%d" % (n * n) for n in range(2000))


def test_docstrings_are_found_and_cleaned():
    assert docstrings('"""Module."""\ndef f():\n    """First.\n\n    Second.\n    """\n') == [
        "Module.",
        "First.\n\nSecond.",
    ]
    nested = """
try:
    class A:
        "A."
        def f(self):
            "A.f."
            match self:
                case 1:
                    def g(): "g."
except ValueError:
    async def h(): "h."
else:
    if True:
        def i(): "i."
finally:
    lambda: [1 for x in "no"]
def j(): "j."
"""
    tree = ast.parse(nested)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    expected = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    assert docstrings(nested) == [text for text in expected if text]
    assert set(docstrings(nested)) == {"A.", "A.f.", "g.", "h.", "i.", "j."}


def test_batches_depend_on_their_seed_alone():
    for stage in STAGES:
        ids, weights = batch(random.Random("1/7"), CORPUS, stage, 8)
        again, _ = batch(random.Random("1/7"), CORPUS, stage, 8)
        assert ids.shape == weights.shape == (8, stage.length)
        assert torch.equal(ids, again)
        assert set(weights.unique().tolist()) <= {0, 1, TRUST}


def test_unpredictable_tokens_carry_no_loss():
    stage = Stage(512, 0, copying=1, recall=0)
    ids, weights = batch(random.Random(0), CORPUS, stage, 60)
    counted = weights > 0
    assert 0.1 < counted.float().mean() < 0.9
    for row, counts in zip(ids.tolist(), counted.tolist(), strict=True):
        text = bytes(row)
        for start in (at for at in range(1, 512) if counts[at] and not counts[at - 1]):
            assert text[start - LOST : start] in text[: start - LOST]  # a piece that stood before


def test_loss_weight_of_predictable_tokens():
    text = b"0123456789abcdefX, 0123456789abcdefY, 0123456789abcdefX"
    ids, weights = batch(random.Random(0), text + b" ", Stage(len(text), 0, copying=0, recall=0), 1)
    assert bytes(ids[0].tolist()) == text
    assert MATCH == 16
    assert (weights[0] == 0).nonzero()[:, 0].tolist() == [text.index(b"Y")]
    assert (weights[0] == TRUST).nonzero()[:, 0].tolist() == [52, 53, 54]  # "ef", and the X that stood there too


def test_facts_precede_their_questions():
    ids, _ = batch(random.Random(0), CORPUS, Stage(1024, 0, copying=0, recall=1), 40)
    for row in ids.tolist():
        told, _, asked = bytes(row).partition(b"\nWhat is the ")
        key = asked.rstrip(b".").split()[-1]
        assert key.isdigit()
        assert key in told or asked.count(key) > 1


def test_overlap_with_evaluation_text_is_found():
    text = "He said: the quick brown fox jumps over the lazy dog, then it sleeps until noon."
    assert Overlap(f"So {text.upper()} Indeed.").with_text(text)[0].startswith("he said the quick")
    assert not Overlap("the quick brown fox jumps over the lazy dog").with_text(text)


@pytest.mark.long
def test_corpus_contains_no_evaluation_text(data_dir):
    overlap = Overlap(load_corpus().decode(errors="replace"))
    files = [path for path in data_dir.iterdir() if path.suffix in (".json", ".txt")]
    assert files
    for path in files:
        assert overlap.with_text(path.read_text(encoding="utf-8")) == [], path


def test_learning_rate_warms_up_and_decays():
    assert learning_rate(0, 1) == 0
    assert learning_rate(0.02, 1) == 1
    assert learning_rate(1, 1) < 0.06


def test_killed_training_continues_identically(tmp_path, monkeypatch):
    monkeypatch.setattr("vcsd_eval.model.train_checkpoint.STAGES", (Stage(64, 640, copying=0, recall=0),))
    plans = schedule(128)
    assert len(plans) == 5

    def go(run, some):
        for plan in some:
            run.step(CORPUS, plan)
        return run

    whole = go(TrainingRun(tmp_path / "a.pt", 1, "cpu"), plans)
    go(TrainingRun(tmp_path / "b.pt", 1, "cpu"), plans[:3]).save()
    again = go(TrainingRun(tmp_path / "b.pt", 1, "cpu"), plans[3:])
    expected, beginning = whole.model.state_dict(), new_model(1).state_dict()
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
        assert torch.equal(weight, beginning[name]) == bool(HELD.search(name)), name


def test_byte_tokenizer_round_trips_text():
    tokenizer, text = byte_tokenizer(), "naïve — 東京\n\t\x00"
    ids = tokenizer(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_shipped_checkpoint_has_expected_shapes():
    weights = CHECKPOINT / "model.safetensors"
    assert weights.stat().st_size <= 16e6
    model, tokenizer = load(CHECKPOINT)
    assert model.config.head_dim == 64
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    assert model.config.max_position_embeddings >= 4096
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in new_model(0).named_parameters()}
    assert bytes(tokenizer("é")["input_ids"]) == "é".encode()
