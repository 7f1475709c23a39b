"""What the shipped checkpoint is trained on, and how it is stored."""

import random

import torch

from eval.corpus import docstrings
from eval.decode import CHECKPOINT, load
from eval.train_checkpoint import CURRICULUM, IGNORED, batch, byte_tokenizer, learning_rate, new_model

CORPUS = bytes(range(32, 127)) * 100


def test_docstrings_are_found_and_cleaned():
    assert docstrings('"""Module."""\ndef f():\n    """First.\n\n    Second.\n    """\n') == [
        "Module.",
        "First.\n\nSecond.",
    ]


def test_batches_depend_on_their_seed_alone():
    for stage in CURRICULUM:
        ids, labels = batch(random.Random("1/7"), CORPUS, stage, 8)
        again, _ = batch(random.Random("1/7"), CORPUS, stage, 8)
        assert ids.shape == labels.shape == (8, stage.length)
        assert torch.equal(ids, again)
        assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])


def test_noise_carries_no_loss_before_it_repeats():
    stage = CURRICULUM[0]
    _, labels = batch(random.Random(0), CORPUS, stage, 200)
    silent = (labels == IGNORED).sum(1)
    assert 0 < (silent > 0).float().mean() < 1
    assert silent.max() <= stage.length // 2


def test_the_rate_warms_up_and_cools_down():
    assert learning_rate(0, 1) == 0
    assert learning_rate(0.02, 1) == 1
    assert learning_rate(1, 1) < 0.06


def test_tokens_are_bytes():
    tokenizer, text = byte_tokenizer(), "naïve — 東京\n\t\x00"
    ids = tokenizer(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_the_shipped_checkpoint():
    weights = CHECKPOINT / "model.safetensors"
    assert weights.stat().st_size <= 16e6
    model, tokenizer = load(CHECKPOINT)
    assert model.config.head_dim == 64
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    assert model.config.max_position_embeddings >= 2048
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in new_model(0).named_parameters()}
    assert bytes(tokenizer("é")["input_ids"]) == "é".encode()
