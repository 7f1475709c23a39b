"""The shipped checkpoint decodes the same in drives as without."""

import pytest
import torch

from vcsd.config import AttachConfig
from vcsd.generate import agreement, continue_text, generate
from vcsd.loading import CHECKPOINT, PROMPT, encode, load


@pytest.fixture(scope="module")
def shipped():
    return load(CHECKPOINT)


def compare(model, tokenizer, inputs, new_tokens, setting):
    done = continue_text(model, tokenizer, inputs, new_tokens, setting)
    return agreement(model, inputs, new_tokens, setting, done)


def setting(drives, method, compression=1):
    return AttachConfig(method=method, compression=compression, drives=drives)


@pytest.mark.parametrize(
    ("drives", "attention", "batch"),
    [(1, "dense", 1), (2, "dense", 3), (3, "dense", 1), (4, "dense", 1), (3, "sparf", 1)],
)
def test_greedy_tokens_equal_sdpa(shipped, drives, attention, batch):
    model, tokenizer = shipped
    inputs = encode(model, tokenizer, PROMPT.read_text(), batch, 128, seed=0)
    done = continue_text(model, tokenizer, inputs, 128, setting(drives, attention))
    match = agreement(model, inputs, 128, setting(drives, attention), done)
    assert match.max_abs_logit_diff < 0.05
    # Other rows begin in the middle of a word; where the best two logits are as close as rounding, either is right
    expected, wanted = generate(model, inputs, 128, None)
    assert torch.equal(done.rows[0], expected[0])
    for row in (done.rows != expected).any(1).nonzero()[:, 0].tolist():
        at = int((done.rows[row] != expected[row]).nonzero()[0, 0])
        margin = wanted[at, row, expected[row, at]] - wanted[at, row, done.rows[row, at]]
        assert margin < 2 * match.max_abs_logit_diff
    assert match.top1_match_rate > 0.99


def test_sparse_decode_is_compared_on_the_references_text(shipped):
    """However far a sparse run wanders off, the logits are compared step by step on the same tokens."""
    model, tokenizer = shipped
    inputs = encode(model, tokenizer, PROMPT.read_text(), 1, 64, seed=0)
    coarse, fine = (compare(model, tokenizer, inputs, 64, setting(2, "sparf", c)).max_abs_logit_diff for c in (32, 2))
    assert 0 < fine < coarse < 30


def test_dense_decode_of_wikitext_is_close_to_sdpa(shipped, data_dir):
    model, tokenizer = shipped
    prompt = (data_dir / "wikitext-2-raw-test.txt").read_text()[:1500]
    inputs = encode(model, tokenizer, prompt, 1, 64, seed=0)
    done = compare(model, tokenizer, inputs, 64, setting(3, "dense"))
    assert done.max_abs_logit_diff < 0.05
    assert done.top1_match_rate > 0.98


def test_batch_rows_left_padded_by_seed(shipped):
    model, tokenizer = shipped
    rows = [encode(model, tokenizer, "abcdefgh" * 8, 3, 4, seed)["attention_mask"] for seed in (1, 1, 2)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert rows[0][0].all()
    assert rows[0][:, -32:].all()
