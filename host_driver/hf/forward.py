"""Forward of an attached model, and micro-batches that overlap model and drives in a decode step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from host_driver.command_order import OrderBrokenError
from host_driver.driver import Driver
from host_driver.hf.adapters import ADAPTERS, adapted
from host_driver.hf.attention import csd_attention, register
from host_driver.hf.cache import IMPLEMENTATION, CsdCache
from host_driver.hf.external_cache import C, ExternalCache, cache_for, own_layers
from host_driver.hf.latent import in_latent_space
from host_driver.hf.replay import Replay
from host_driver.hf.shape import LayerPlacement, UnsupportedModelError

_OTHERS = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")  # inputs of cross-attention


def check_not_attached(model: PreTrainedModel) -> None:
    """Raise Unsupported if a model is attached already."""
    if getattr(vars(model).get("forward"), "is_in_tiers", False):
        raise UnsupportedModelError(
            "this model is attached already, with the KV cache in tiers: close that session first"
        )
    if model.config._attn_implementation == f"{IMPLEMENTATION}-rows":
        raise UnsupportedModelError("this model serves already: close its server first")
    if model.config._attn_implementation == IMPLEMENTATION:
        if "forward" in vars(model):
            raise UnsupportedModelError("this model is attached to drives already: close that session first")
        raise UnsupportedModelError(
            "this model shares its config with one that is attached to drives: load it with its own config"
        )
    for name, part in model.named_modules():
        if name and (hasattr(part, "_orig_mod") or part._compiled_call_impl is not None):
            raise UnsupportedModelError(
                f"{name} is compiled separately: attach the model before its parts are compiled"
            )


@contextmanager
def in_drives(
    model: PreTrainedModel, driver: Driver, placed: LayerPlacement, micro_batches: int, replay: Replay | None = None
) -> Iterator[None]:
    """Run layers of a model in drives until the block ends, then restore the model.

    Args:
        model: The model.
        driver: Driver of the attached drives.
        placed: Placement of the model's layers.
        micro_batches: Micro-batches of a decode step.
        replay: Records every forward, to recompute lost heads.
    """
    check_not_attached(model)
    register()
    own, compiled = model.__dict__.get("forward"), model._compiled_call_impl
    model._compiled_call_impl = None
    try:
        with use_attention_interface(model, IMPLEMENTATION, csd_attention):
            if replay:
                replay.forward_on = functools.partial(csd_forward, model, model.forward, placed, micro_batches)
            model.forward = csd_forward(model, model.forward, placed, micro_batches, driver, replay)
            yield
    finally:
        model.__dict__.pop("forward", None)
        if own is not None:
            model.forward = own
        model._compiled_call_impl = compiled


@contextmanager
def use_attention_interface(
    model: PreTrainedModel, implementation: str, interface: Callable[..., Any]
) -> Iterator[None]:
    """Make a model use our attention until the block ends, by its name in AttentionInterface."""
    if model.config.get_text_config(decoder=True).model_type in ADAPTERS:
        with adapted(model, implementation, interface):
            yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        with in_latent_space(model):
            yield
    finally:
        model.set_attn_implementation(before)


def csd_forward(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    placed: LayerPlacement,
    micro_batches: int,
    driver: Driver,
    replay: Replay | None = None,
) -> Callable[..., Any]:
    """`forward` of a model with a `CsdCache` instead of an empty cache. `replay`: see `in_drives`."""
    config = model.config.get_text_config(decoder=True)
    max_tokens = getattr(config, "max_position_embeddings", None) or 4096
    if placed.is_mixed or any(hasattr(module, "rope_deltas") for module in model.modules()):
        micro_batches = 1  # the model keeps per-sequence state between forwards

    def make(given: Cache | None) -> CsdCache:
        layers = own_layers(model, given, len(placed.kinds), placed.in_drives)
        return CsdCache(driver, config, max_tokens, layers, placed.in_drives)

    def run(forward: Callable[..., Any], cache: CsdCache, given: dict[str, Any]) -> Any:
        with replay.recorded(cache, given) if replay else nullcontext():
            return _run(forward, driver, micro_batches, cache, given)

    return own_forward(model, forward, driver, make, run)


def own_forward(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    owner: object,
    make: Callable[[Cache | None], C],
    run: Callable[[Callable[..., Any], C, dict[str, Any]], Any],
) -> Callable[..., Any]:
    """`forward` of a model with our cache instead of an empty one, and the same signature.

    It is never compiled: a compiled graph cannot wait for data elsewhere.
    """
    signature, uncompiled_forward = inspect.signature(forward), torch.compiler.disable(forward)
    config = model.config.get_text_config(decoder=True)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = kwargs
        if args:
            given = signature.bind_partial(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
        own, use_cache = given.get("past_key_values"), given.get("use_cache")
        if own is None and not (config.use_cache if use_cache is None else use_cache):
            return uncompiled_forward(**given)
        if other := [name for name in _OTHERS if given.get(name) is not None]:
            raise UnsupportedModelError(
                f"{other[0]}: cross-attention is not supported, only attention to a model's own tokens"
            )
        cache = cache_for(own, owner, make)
        with cache.forward():
            out = run(uncompiled_forward, cache, given | {"past_key_values": cache})
        if own is not None:
            cache.replace_layers(own)
        return _replace_cache(out, cache if own is None else own, given)

    uncompiled: Callable[..., Any] = torch.compiler.disable(wrapped)
    return uncompiled


def _replace_cache(out: Any, cache: Cache, given: dict[str, Any]) -> Any:
    """Output of a forward with the caller's cache in it."""
    if isinstance(out, tuple):
        return tuple(cache if isinstance(each, ExternalCache) else each for each in out)
    out["past_key_values"] = cache
    return out.to_tuple() if given.get("return_dict") is False else out


def _run(
    forward: Callable[..., Any], driver: Driver, micro_batches: int, cache: CsdCache, given: dict[str, Any]
) -> Any:
    ids = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    assert ids is not None, "a forward has input_ids or inputs_embeds"
    batch, new = ids.shape[:2]
    decode = new == 1 and cache.get_seq_length() > 0
    if not decode:
        out = forward(**given)
        driver.settle()
        return out
    count = min(micro_batches, batch)
    with driver.step(count) as each:
        if count == 1:
            with cache.whole(each[0]):
                return forward(**given)
        cuts = [number * batch // count for number in range(count + 1)]
        rows = [slice(first, end) for first, end in pairwise(cuts)]
        parts = [cache.part(mine, micro_batch) for mine, micro_batch in zip(rows, each, strict=True)]
        outs = _run_micro_batches(forward, given, parts, batch)
        cache.merge(parts)
    return _concatenate(outs)


def _run_micro_batches(
    forward: Callable[..., Any], given: dict[str, Any], parts: list[CsdCache], batch: int
) -> list[ModelOutput]:
    """Run each micro-batch in its own thread: while one waits for drives, another uses the model."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(part: CsdCache) -> ModelOutput:
        assert part.micro_batch is not None
        failed = True
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                mine = {name: _rows(name, value, part.rows, batch) for name, value in given.items()}
                out = forward(**(mine | {"past_key_values": part, "return_dict": True}))
            failed = False
            return out
        finally:
            part.micro_batch.leave(failed)

    with ThreadPoolExecutor(len(parts), thread_name_prefix="micro-batch") as pool:
        futures = [pool.submit(run, part) for part in parts]
        errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, OrderBrokenError)), errors[0])
    return [future.result() for future in futures]


def _rows(name: str, value: Any, rows: slice, batch: int) -> Any:
    """A micro-batch's part of an argument: tensors with a batch dimension are sliced, others are shared.

    The batch is the first dimension, except for positions along several axes, (axes, B, S).
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    if name == "position_ids" and value.dim() == 3:
        return value[:, rows]
    return value[rows] if value.shape[0] == batch else value


def _concatenate(outs: list[ModelOutput]) -> ModelOutput:
    joined = {}
    for name, first in outs[0].items():
        if isinstance(first, torch.Tensor) and first.dim():
            joined[name] = torch.cat([out[name] for out in outs])
        elif name != "past_key_values":
            raise UnsupportedModelError(
                f"output {name!r} cannot be joined from micro-batches: attach with micro_batches=1"
            )
    return type(outs[0])(**joined)
