"""One architecture, tiny and with random weights: KV cache in drives, or in tiers, compared with its own attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import vcsd
from host_driver.hf.cache_argument import CACHE_ARGUMENTS, cache_argument, forward_on
from host_driver.hf.shape import FULL, kinds_in_tiers, placement
from tests.host_driver.hf.architectures.refusals import confirmed
from tests.host_driver.hf.architectures.tiny import VOCABULARY, build

PROMPT, PADDED, NEW = 40, (0, 13, 27), 64  # tokens; more than a window has
MORE, AGAIN = 5, 8  # of a second turn: fed, and generated
DRIVES = 1, 3
SPREAD = 3.0  # of the weights: with less attention is flat, and what is wrong with it does not show

# Rounding to FP16 errs by 2^-11 at most: of q, k, v and the output in each of 4 layers
TOLERANCE = 2.0**-7  # of the largest logit
SHOWS = 0.25  # fraction of the logit change caused by another first token

# In tiers, in layers of the larger input: the others, more than half of them, are past the page cache or on their way
DEVICE_LAYERS, HOST_LAYERS, CACHE_LAYERS = 2, 1, 2


@dataclass(frozen=True, slots=True)
class Row:
    """Result of an architecture: right, refused, not_built, wrong or crashed, and the reason.

    Attributes:
        reason_checked: Whether an independent check confirms the reason of a refusal.
        difference: Largest difference of all logits, as a fraction of the largest logit.
        control: The same for another first token of the prompt, with the model's own attention.
        tokens_equal: Fraction of the steps with the same best token.
    """

    name: str
    outcome: str
    reason: str = ""
    reason_checked: bool | None = None
    difference: float | None = None
    control: float | None = None
    tokens_equal: float | None = None


class Forced(LogitsProcessor):
    """Makes greedy decoding take given tokens, (B, positions) of all that is fed and generated."""

    def __init__(self, tokens: torch.Tensor | None) -> None:
        self.tokens, self.begun = tokens, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.begun = True
        if self.tokens is None:
            return scores
        wanted = self.tokens[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted, 0.0)


def try_family(name: str, policy: str = "") -> Row:
    """Build a tiny model, decode with its own attention and in drives, and compare.

    Inputs are a prompt alone, and one in a batch with another that is padded on the left. In drives the model is fed
    the tokens of its own decoding, so that every step's logits can be compared; best tokens that are nearly tied may
    differ.

    Args:
        name: Architecture.
        policy: Policy of a tiered KV cache that replaces drives; then the logits must be bit-identical.
    """
    torch.set_num_threads(1)
    with torch.inference_mode():
        return _try_family(name, policy)


def _try_family(name: str, policy: str) -> Row:
    try:
        model = build(name, SPREAD)
    except Exception as error:  # noqa: BLE001 - a config of defaults and small sizes can raise any exception
        return Row(name, "not_built", _line(error))
    made = Row(name, "wrong")
    refusal = None
    try:
        kinds_in_tiers(model) if policy else placement(model)
    except vcsd.UnsupportedModelError as error:
        refusal = error
    except Exception as error:  # noqa: BLE001 - any exception is a defect
        return replace(made, outcome="crashed", reason=_line(error))
    try:
        if refusal:
            return _refused(made, model, refusal)
        own, other = _by_itself(model)
    except Exception as error:  # noqa: BLE001 - a model that cannot attend to a prompt by itself
        return replace(made, outcome="not_built", reason=_line(error))
    largest = max(float(logits.abs().max()) for _, logits in own)
    control = float((other - own[0][1]).abs().max()) / largest
    if not 0 < control < torch.inf:
        return replace(made, outcome="not_built", reason="its own logits are not finite, or alike for all prompts")
    return _compare(replace(made, control=control), model, own, policy)


def _by_itself(model: PreTrainedModel) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Tokens and logits of both inputs, and the first one's logits after another first token."""
    model.generation_config.eos_token_id, model.generation_config.use_cache = None, True
    inputs = _inputs()
    own = [_decode(model, each, Forced(None)) for each in inputs]
    exchanged = inputs[0] | {"input_ids": inputs[0]["input_ids"].index_fill(1, torch.tensor([0]), 5)}
    return own, _decode(model, exchanged, Forced(own[0][0]))[1]


def _compare(made: Row, model: PreTrainedModel, own: list[tuple[torch.Tensor, torch.Tensor]], policy: str) -> Row:
    """The row, completed by the comparison with drives or tiers."""
    forced = [Forced(tokens) for tokens, _ in own]
    try:
        got, reports = [], []
        for where in _elsewhere(model, policy):
            with where as elsewhere:
                got += [_decode(model, *each)[1] for each in zip(_inputs(), forced, strict=True)]
                reports.append(elsewhere.report())
    except vcsd.UnsupportedModelError as error:
        if forced[0].begun:
            return replace(made, outcome="crashed", reason=f"refused after the first token: {error}")
        return _refused(made, model, error)
    except Exception as error:  # noqa: BLE001 - a defect, as in placement
        return replace(made, outcome="crashed", reason=_line(error))
    pairs = [(logits, wanted) for logits, (_, wanted) in zip(got, own * len(reports), strict=True)]
    largest = max(float(wanted.abs().max()) for _, wanted in pairs)
    difference = max(float((logits - wanted).abs().max()) for logits, wanted in pairs) / largest
    equal = torch.cat([(logits.argmax(-1) == wanted.argmax(-1)).flatten() for logits, wanted in pairs])
    made = replace(made, difference=difference, tokens_equal=float(equal.float().mean()))
    if lacking := "; ".join(filter(None, (_not_elsewhere(report, len(own)) for report in reports))):
        return replace(made, reason=lacking)
    assert made.control is not None
    if not difference <= (0.0 if policy else min(TOLERANCE, SHOWS * made.control)):
        return replace(made, reason=f"logits differ by {difference:.2g} of the largest")
    return replace(made, outcome="right")


def _elsewhere(model: PreTrainedModel, policy: str) -> Iterator[AbstractContextManager[Any]]:
    """The model with its KV cache in one drive, in several if it has enough heads, or in small tiers."""
    if not policy:
        shape = placement(model).shape
        heads = shape.q_heads if shape.latent else shape.kv_heads
        for drives in sorted({min(drives, heads) for drives in DRIVES}):
            yield vcsd.attach(model, drives=drives, method="dense")
        return
    kinds = kinds_in_tiers(model)
    cache = DynamicCache() if set(kinds) == {FULL} else DynamicCache(config=model.config)
    forward_on(model, cache, **_inputs()[-1])
    full = [layer for layer, kind in zip(cache.layers, kinds, strict=True) if kind == FULL]
    stored = full[0].get_seq_length()  # the prompt and the tokens that a model prepends
    token = max(2 * max(layer.keys.nbytes, layer.values.nbytes) for layer in full) // stored
    longest = stored + NEW + MORE + AGAIN
    layer = token * longest
    device = min(DEVICE_LAYERS, max(1, len(full) - 1))  # so that not all are there
    tiers = vcsd.TierLimits(device * layer, HOST_LAYERS * layer, CACHE_LAYERS * layer, max_tokens=longest)
    yield vcsd.attach(model, policy=policy, tiers=tiers, record=True)


def _not_elsewhere(report: vcsd.Report, inputs: int) -> str:
    """Reason why the KV cache of a report cannot be moved to drives or tiers; empty if it can."""
    if report.drives:
        steps = report.drives.steps
        return "" if steps == inputs * (NEW - 1 + AGAIN - 1) else f"{steps} steps were in drives"
    moves = len(report.layers[FULL]) > 1  # one alone may stay on the device
    if report.iterations != inputs * (NEW + AGAIN) or (moves and not any(route["bytes"] for route in report.routes)):
        return f"{report.iterations} forwards were in tiers"
    if over := [each["name"] for each in report.tiers if (each["limit_bytes"] or torch.inf) < each["peak_bytes"]]:
        return f"more was at {over[0]} than may be"
    if odd := [route["name"] for route in report.routes if route["bytes"] != route["simulated_bytes"]]:
        return f"other bytes took the route {odd[0]} than in modelled time"
    return ""


def _refused(made: Row, model: PreTrainedModel, error: vcsd.UnsupportedModelError) -> Row:
    checked = confirmed(str(error), model, _inputs()[0]["input_ids"])
    return replace(made, outcome="refused", reason=str(error), reason_checked=checked)


def _inputs() -> list[dict[str, torch.Tensor]]:
    """A prompt, and a batch of it and two that are padded on the left."""
    ids = torch.randint(10, VOCABULARY, (len(PADDED), PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padded in enumerate(PADDED):
        mask[row, :padded], ids[row, :padded] = 0, 0
    return [{"input_ids": ids[:rows], "attention_mask": mask[:rows]} for rows in (1, len(PADDED))]


def _decode(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], forced: Forced
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy decoding in two turns on one cache.

    Returns:
        Tokens (B, positions) fed and generated, and logits (steps, B, vocabulary) of the generated ones.
    """
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    options |= {"logits_processor": LogitsProcessorList([forced])}
    first = model.generate(**inputs, max_new_tokens=NEW, **options)
    asked = torch.cat([first.sequences, first.sequences[:, :MORE]], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW + MORE), value=1)
    name = cache_argument(model.forward) or CACHE_ARGUMENTS[0]
    again = {"input_ids": asked, "attention_mask": mask, name: first.get(name)}
    second = model.generate(**again, max_new_tokens=AGAIN, **options)
    return second.sequences, torch.stack([*first.logits, *second.logits]).float()


def _line(error: Exception) -> str:
    """An error as one line of text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
