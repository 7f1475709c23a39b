"""The engine on recorded q, k and v of the shipped model: golden model, software kernel and RTL agree."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from rtl_bench import BUILDS, simulate

from attention_engine import approximate, attend, best_tokens, reference, selected_mass, softmax_scores, top_channels
from attention_engine.rtl.golden import sparf_engine
from attention_engine.rtl.params import EngineRun, EngineShape, ProgressiveShape
from csd_spec import LAYOUTS, CompressionBudget, KvSlotView
from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy.recorded import TEXT, record

TOKENS = 400
COMPRESSION = 8
SHAPE = EngineShape(head_dim=64, q_heads=2, lanes=32, n_max=1024, page_bytes=4096)
TIE = 1e-5  # of the k-th score
MAX_ULPS = 2.0  # of FP16 at the largest |value| of V that is attended


@pytest.fixture(scope="module")
def heads():
    """(q (G, d), K (S, d), V (S, d), mean of V) of the newest token, FP16, of one head in each layer."""
    model, tokenizer = load(CHECKPOINT)
    text = TEXT.read_text()
    ids = torch.tensor(tokenizer(text)["input_ids"])[None, :TOKENS]
    recorded = []
    for layer, part in enumerate(record(model, ids)):
        head = layer % part.k.shape[1]
        q = part.q[0, 2 * head : 2 * head + 2, -1]
        K, V = part.k[0, head], part.v[0, head]
        recorded.append((q, K, V, (V.astype(np.float32).sum(0) / np.float32(TOKENS)).astype(np.float16)))
    return recorded


def run_at(m):
    budget = CompressionBudget(COMPRESSION).at(TOKENS, SHAPE.head_dim)
    return EngineRun(shape=SHAPE, sparf=budget, m=m, n=SHAPE.page_values // SHAPE.head_dim, seq_len=TOKENS)


def golden(head, run):
    return sparf_engine(*(np.ascontiguousarray(part).view(np.uint16) for part in head), run)


def view_of(K, V, run):
    """K and V of one head in pages, one after the other."""
    layout = LAYOUTS["fp16"].paged(2 * SHAPE.page_values, SHAPE.head_dim, run.m)
    S, n, T = run.seq_len, run.n, run.group_tokens
    pages = []
    for rows in (K, V):
        padded = np.zeros((-(-S // n) * n, SHAPE.head_dim), np.float16)
        padded[:S] = rows
        pages.append(padded.reshape(-1, SHAPE.page_values))
    padded = np.zeros((run.groups * T, SHAPE.head_dim), np.float16)
    padded[:S] = K
    spans = padded.reshape(run.groups, T, -1, run.m).transpose(2, 0, 3, 1)
    pages.append(spans.reshape(-1, SHAPE.page_values))
    starts = np.cumsum([0, *(len(part) for part in pages)])
    slots = [np.arange(a, b, dtype=np.uint32) for a, b in pairwise(starts)]
    bank = np.concatenate(pages).view(np.uint16)
    e_slots = slots[2].reshape(1, -1, run.groups)
    return KvSlotView(layout, (bank, bank[:1]), np.array([S]), slots[0][None], slots[1][None], e_slots)


def software(head, run):
    """The software kernel: output (G, d), tokens, and the score of every token."""
    q, K, V, _ = head
    p, one, view = run.sparf, np.ones(1, np.int64), view_of(K, V, run)
    q = np.ascontiguousarray(q[None], np.float32)
    logits = approximate(view, q, top_channels(q, p.r))
    scores = softmax_scores(logits, run.seq_len * one)
    tokens = best_tokens(scores, run.seq_len * one, p.k * one, p.l * one)
    mean = V.astype(np.float32).sum(0)[None] / np.float32(run.seq_len)
    out = attend(view, q, (tokens, p.k * one), selected_mass(logits, tokens, p.k * one), mean)
    return out[0], tokens[0], scores[0]


def ulps(got, want, V):
    top = np.abs(V.astype(np.float64)).max()
    return np.abs(got.astype(np.float64) - want).max() / 2.0 ** (np.floor(np.log2(top)) - 10)


@pytest.mark.parametrize("m", [2, 8])
def test_recorded_tokens_equal_software_kernel_except_ties(heads, m):
    run, ties = run_at(m), 0
    for head in heads:
        got, (want, tokens, scores) = golden(head, run), software(head, run)
        kth = np.sort(scores[: -run.sparf.l])[-(run.sparf.k - run.sparf.l)]
        differ = np.setxor1d(got.tokens, tokens)
        assert (np.abs(scores[differ] - kth) <= TIE * kth).all()
        ties += len(differ) // 2
        if not len(differ):
            assert ulps(got.out.view(np.float16), want, head[2]) <= MAX_ULPS
        assert not got.bad
    print(f"m = {m}: {ties} ties among {len(heads) * run.sparf.k} tokens")


def test_output_within_ulps_of_algorithm_1(heads):
    run = run_at(4)
    for head in heads:
        got = golden(head, run)
        q, K, V = (part.astype(np.float64) for part in head[:3])
        want, channels, tokens = reference.sparf(q, K, V, run.sparf.r, run.sparf.k, run.sparf.l)
        assert got.channels == channels.tolist() and got.tokens == tokens.tolist()
        assert ulps(got.out.view(np.float16), want, V) <= MAX_ULPS


@pytest.mark.rtl
def test_recorded_rtl_equals_golden_model(heads):
    BUILDS.mkdir(exist_ok=True)
    path = BUILDS / "recorded.npz"
    np.savez(path, *(part.view(np.uint16) for head in heads for part in map(np.ascontiguousarray, head)))
    simulate(
        "sparf_engine",
        SHAPE.verilog(),
        covers=False,
        test="recorded",
        RTL_HEADS=str(path),
        RTL_COMPRESSION=json.dumps(COMPRESSION),
    )


@pytest.mark.slow
@pytest.mark.rtl
def test_recorded_progressive_engine_equals_golden_model(heads):
    BUILDS.mkdir(exist_ok=True)
    path = BUILDS / "recorded_progressive.npz"
    np.savez(path, *(part.view(np.uint16) for head in heads for part in map(np.ascontiguousarray, head[:3])))
    parameters = ProgressiveShape(head_dim=64, m=64, q_heads=2).engine(512)
    simulate("progressive_engine", parameters, covers=False, test="recorded_progressive", RTL_HEADS=str(path))
