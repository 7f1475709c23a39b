"""SparF's choice of tokens in the drive's kernels against Algorithm 1 in float64, on recorded q, k and v."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_engine import METHODS, DecodeStep, Queries
from attention_engine.reference import sparf, token_scores
from csd_spec import LAYOUTS, CompressionBudget
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl
from vcsd.loading import CHECKPOINT, load
from vcsd.options import MAX_COMPRESSION, ModelFolder
from vcsd.progress import Tick, no_tick, progress, status
from vcsd_eval.accuracy import texts
from vcsd_eval.accuracy.recorded import Recorded, record
from vcsd_eval.experiment import Outcome, flat

TIE = 1e-5  # relative to the k-th score, the sum of weights: tokens that are nearer to it may be chosen in any order


def compare_choices(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    tokens: int,
    steps: int,
    compression: float,
    tick: Tick = no_tick,
) -> dict[str, Any]:
    """Choices of all layers and KV heads in `steps` decode steps after `tokens` tokens of a text.

    A choice is one head's set of k tokens in one step. Where it differs from the oracle's, every token that only one
    of the two has must be a tie: its score within TIE, relative, of the k-th (scores here are logarithms).
    """
    ids = torch.tensor(tokenizer(text)["input_ids"][: tokens + steps])
    context = model.config.get_text_config(decoder=True).max_position_embeddings
    if ids.numel() < tokens + steps:
        raise ValueError(f"the text has {ids.numel()} tokens: tokens + steps = {tokens + steps} are needed")
    if tokens + steps > context:
        raise ValueError(f"tokens + steps = {tokens + steps}: the model's context is {context}")
    layers = record(model, ids[None])
    choices = differing = apart = beyond = 0
    for recorded in layers:
        for ours, theirs, forced, scores in _choices(recorded, tokens, compression):
            choices += 1
            odd = np.setxor1d(ours, theirs)
            if odd.size:
                differing += 1
                kth = scores[np.setdiff1d(theirs, forced)].min()
                apart += odd.size
                beyond += int((np.abs(scores[odd] - kth) > TIE).sum())
        tick(None)
    return {
        "steps": steps,
        "layers": len(layers),
        "choices": choices,
        "equal": choices - differing,
        "differing": differing,
        "differing_tokens": apart,
        "differing_tokens_beyond_ties": beyond,
        "tie_relative": TIE,
    }


def _choices(recorded: Recorded, tokens: int, compression: float) -> Any:
    """Each step's and head's tokens by the kernels, by the oracle, those that are always kept, and all log scores."""
    _, q_heads, length, d = recorded.q.shape
    heads = recorded.k.shape[1]
    ftl = Ftl(INSTCSD_ZYNQ7045_8CH)
    handles = ftl.create(1, 1, heads, LAYOUTS["fp16"].form(ftl.spec.geometry.page_bytes, d, length))
    k, v = (part[0].transpose(1, 0, 2).copy() for part in (recorded.k, recorded.v))
    ftl.append(tuple(handles), 0, np.array([tokens]), k[:tokens], v[:tokens], 0)
    for position in range(tokens, length):
        ftl.append(tuple(handles), 0, np.array([1]), k[position : position + 1], v[position : position + 1], 0)
        stored = position + 1
        params = CompressionBudget(compression).at(stored, d)
        q = recorded.q[0, :, position].astype(np.float32).reshape(heads, q_heads // heads, d)
        v_mean = v[:stored].astype(np.float32).mean(0)
        step = DecodeStep(ftl.view(handles, 0), ftl, Queries.uniform(q, params, v_mean, [{}]))
        METHODS["sparf"](step)
        assert step.chosen is not None
        for head in range(heads):
            K = k[:stored, head].astype(np.float64)
            scores = token_scores(q[head].astype(np.float64), K, params.r)
            theirs = sparf(q[head].astype(np.float64), K, K, params.r, params.k, params.l)[2]
            forced = np.arange(stored - params.l, stored)
            yield step.chosen[0][head, : step.chosen[1][head]], theirs, forced, scores


def experiment(
    text: texts.SourceText = None,
    model: ModelFolder = None,
    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="number of tokens before the first step")] = 1024,
    steps: Annotated[int, typer.Option(min=1, max=1 << 17, help="number of decode steps")] = 1000,
    compression: Annotated[
        float, typer.Option(min=1, max=MAX_COMPRESSION, help="C of the budget 1/C of the KV data")
    ] = 8,
) -> Outcome:
    """SparF's choice of tokens in every layer and head of recorded decode steps, against float64 Algorithm 1."""
    CompressionBudget(compression)
    with status("loading the model"):
        written = texts.read(text)
        loaded, tokenizer = load(model or CHECKPOINT)
    with progress("layers", loaded.config.num_hidden_layers) as tick:
        result = compare_choices(loaded, tokenizer, written, tokens, steps, compression, tick)
    return flat("SparF's choice of tokens against the oracle", result)
