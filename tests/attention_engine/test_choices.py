"""SparF's choice of tokens in the drive's kernels equals Algorithm 1 in float64, on recorded q, k and v."""

import numpy as np
import pytest
import torch

from attention_engine import METHODS, DecodeStep, Queries
from attention_engine.reference import sparf, token_scores
from csd_spec import LAYOUTS, CompressionBudget
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl
from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy.recorded import TEXT, record

TOKENS, STEPS, COMPRESSION = 200, 3, 8
TIE = 1e-5  # of a log score: tokens that are nearer to the k-th may be chosen in any order


@pytest.fixture(scope="module")
def layers():
    model, tokenizer = load(CHECKPOINT)
    return record(model, torch.tensor([tokenizer(TEXT.read_text())["input_ids"][: TOKENS + STEPS]]))


def choices(recorded):
    """q (G, d), K (S, d) in float64, parameters and chosen tokens of each step and KV head of a layer."""
    (_, q_heads, length, d), heads = recorded.q.shape, recorded.k.shape[1]
    ftl = Ftl(INSTCSD_ZYNQ7045_8CH)
    handles = tuple(ftl.create(1, 1, heads, LAYOUTS["fp16"].form(ftl.spec.geometry.page_bytes, d, length)))
    k, v = (part[0].transpose(1, 0, 2).copy() for part in (recorded.k, recorded.v))
    ftl.append(handles, 0, np.array([TOKENS]), k[:TOKENS], v[:TOKENS], 0)
    for position in range(TOKENS, length):
        row = slice(position, position + 1)
        ftl.append(handles, 0, np.array([1]), k[row], v[row], 0)
        params = CompressionBudget(COMPRESSION).at(position + 1, d)
        q = recorded.q[0, :, position].astype(np.float32).reshape(heads, q_heads // heads, d)
        v_mean = v[: position + 1].astype(np.float32).mean(0)
        step = DecodeStep(ftl.view(handles, 0), ftl, Queries.uniform(q, params, v_mean, [{}]))
        METHODS["sparf"](step)
        tokens, counts = step.chosen
        for head in range(heads):
            K = k[: position + 1, head].astype(np.float64)
            yield q[head].astype(np.float64), K, params, tokens[head, : counts[head]]


def test_sparf_chooses_tokens_of_algorithm_1(layers):
    """A token that only one of the two has is a tie: its score is that of the k-th token."""
    count = equal = 0
    for recorded in layers:
        for q, K, params, tokens in choices(recorded):
            expected = sparf(q, K, K, params.r, params.k, params.l)[2]
            scores = token_scores(q, K, params.r)
            recent = np.arange(len(K) - params.l, len(K))  # always chosen, whatever their scores
            differing = np.setxor1d(tokens, expected)
            kth = scores[np.setdiff1d(expected, recent)].min()
            assert (np.abs(scores[differing] - kth) <= TIE).all()
            count += 1
            equal += not differing.size
    assert count == STEPS * 4 * 4  # layers, KV heads
    assert equal >= 0.9 * count
