"""Forward of an attached model, and micro-batches that overlap model and drives in a decode step."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from host_driver.command_order import OrderBrokenError
from host_driver.driver import Driver
from host_driver.hf.adapters import ADAPTERS, adapted
from host_driver.hf.attention import kv_attention, register
from host_driver.hf.cache import IMPLEMENTATION, KvCache
from host_driver.hf.cache_argument import CACHE_ARGUMENTS, OLD_NAME, cache_argument
from host_driver.hf.callers_cache import cache_for, own_layers
from host_driver.hf.latent import in_latent_space
from host_driver.hf.replay import Replay
from host_driver.hf.shape import FULL, UnsupportedModelError
from host_driver.kv_table import KvTable

SERVING = f"{IMPLEMENTATION}-rows"  # name of the attention of a model that serves
_OTHERS = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")  # inputs of cross-attention


def check_not_attached(model: PreTrainedModel) -> None:
    """Raise Unsupported if a model is attached already."""
    if isinstance(attached := vars(model).get("forward"), AttachedForward):
        raise UnsupportedModelError(
            f"this model is attached already, with the KV cache {attached.where}: close that session first"
        )
    if model.config._attn_implementation == SERVING:
        raise UnsupportedModelError("this model serves already: close its server first")
    if model.config._attn_implementation == IMPLEMENTATION:
        raise UnsupportedModelError(
            "this model shares its config with one that is attached to drives: load it with its own config"
        )
    for name, part in model.named_modules():
        if name and (hasattr(part, "_orig_mod") or part._compiled_call_impl is not None):
            raise UnsupportedModelError(
                f"{name} is compiled separately: attach the model before its parts are compiled"
            )


@contextmanager
def attached(
    model: PreTrainedModel, kv: KvTable, kinds: Sequence[str], micro_batches: int = 1, replay: Replay | None = None
) -> Iterator[None]:
    """Keep a model's KV cache in a table until the block ends, then restore the model.

    Args:
        model: The model.
        kv: The table.
        kinds: Kind of each layer; layers without full attention keep the model's own cache.
        micro_batches: Micro-batches of a decode step in drives.
        replay: Records every forward, to recompute lost heads.
    """
    check_not_attached(model)
    own = model.forward
    if replay:

        def forward_on(driver: Driver) -> AttachedForward:
            lost = KvTable.in_drives(driver, next(model.parameters()), kv.max_tokens)
            return attached_forward(model, own, lost, kinds, micro_batches)

        replay.forward_on = forward_on
    forward = attached_forward(model, own, kv, kinds, micro_batches, replay)
    with use_attention(model, IMPLEMENTATION) if kv.drives else nullcontext(), with_forward(model, forward):
        yield


@contextmanager
def with_forward(model: PreTrainedModel, forward: Callable[..., Any] | None = None) -> Iterator[None]:
    """Run a model uncompiled, by another forward (None: by its own), until the block ends; then restore it."""
    own, compiled = model.__dict__.get("forward"), model._compiled_call_impl
    model._compiled_call_impl = None
    if forward:
        model.forward = forward
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        if own is not None:
            model.forward = own
        model._compiled_call_impl = compiled


@contextmanager
def use_attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Make a model use our attention until the block ends, by this name in AttentionInterface."""
    register(implementation)
    if model.config.get_text_config(decoder=True).model_type in ADAPTERS:
        with adapted(model, implementation, kv_attention):
            yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        with in_latent_space(model):
            yield
    finally:
        model.set_attn_implementation(before)


def attached_forward(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    kv: KvTable,
    kinds: Sequence[str],
    micro_batches: int,
    replay: Replay | None = None,
) -> AttachedForward:
    """`forward` of a model with a `KvCache` instead of an empty cache; see `attached`."""
    config = model.config.get_text_config(decoder=True)
    placed = [number for number, kind in enumerate(kinds) if kind == FULL]
    if len(placed) < len(kinds) or any(hasattr(module, "rope_deltas") for module in model.modules()):
        micro_batches = 1  # the model keeps per-sequence state between forwards

    def make(cache: Cache | None) -> KvCache:
        return KvCache(kv, config, own_layers(model, cache, kinds), placed)

    def run_attached(forward: Callable[..., Any], cache: KvCache, arguments: dict[str, Any]) -> Any:
        if (mask := arguments.get("attention_mask")) is not None:
            arguments = arguments | {"attention_mask": _cut(mask, cache)}
        if cache.attends:
            arguments = cache.checked(arguments)
            with replay.recorded(cache, arguments) if replay else nullcontext():
                return _run_in_drives(forward, micro_batches, cache, arguments)
        if model.training:
            raise UnsupportedModelError(
                "a KV cache in tiers has no gradients (inference only): call model.eval() first"
            )
        return forward(**arguments)

    return AttachedForward(model, forward, kv, make, run_attached)


def _cut(mask: Any, cache: KvCache) -> Any:
    """Cut a static cache's mask, (B, 1, new, size), to the stored tokens; other masks are unchanged."""
    if isinstance(mask, dict):
        return {kind: _cut(layer_mask, cache) if kind == FULL else layer_mask for kind, layer_mask in mask.items()}
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return mask
    return mask[..., : cache.get_seq_length() + mask.shape[2]]


class AttachedForward:
    """`forward` of a model with our cache instead of an empty one, and the same signature.

    It is never compiled: a compiled graph cannot wait for data elsewhere. Copying or pickling the model raises: the
    copy's forward would run this model's weights.

    Attributes:
        where: Location of the KV data, for messages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        kv: KvTable,
        make: Callable[[Cache | None], KvCache],
        run: Callable[[Callable[..., Any], KvCache, dict[str, Any]], Any],
    ) -> None:
        """Wrap the forward of a model.

        Args:
            model: The model.
            forward: Its forward.
            kv: The KV data of the session.
            make: Creates our cache for a forward, given the caller's empty one.
            run: Runs the model's forward on our cache.
        """
        functools.update_wrapper(self, forward)
        self.where, self._kv, self._make, self._run = kv.where, kv, make, run
        self._signature, self._forward = inspect.signature(forward), torch.compiler.disable(forward)
        self._config, self._process = model.config.get_text_config(decoder=True), os.getpid()
        name = cache_argument(forward)
        assert name is not None, "a model whose cache cannot be replaced is refused before it is attached"
        self.cache_name = name
        self._uncompiled = torch.compiler.disable(self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedModelError(
            f"this model is attached, with its KV cache {self.where}: copy or save it before or after the block"
        )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = kwargs
        if args:
            arguments = self._signature.bind_partial(*args, **kwargs).arguments
            arguments |= arguments.pop("kwargs", {})
        if self.cache_name != OLD_NAME and arguments.get(OLD_NAME) is not None:
            if arguments.get(self.cache_name) is not None:
                raise UnsupportedModelError(f"{self.cache_name} and {OLD_NAME}: a forward uses one cache: pass one")
            arguments[self.cache_name] = arguments.pop(OLD_NAME)
        own, use_cache = arguments.get(self.cache_name), arguments.get("use_cache")
        if own is None and not (self._config.use_cache if use_cache is None else use_cache):
            return self._forward(**arguments)
        if os.getpid() != self._process:
            raise UnsupportedModelError(
                f"this process was forked after its model was attached, with the KV cache {self.where} of its parent: "
                "attach a model in the process that generates"
            )
        if other := [name for name in _OTHERS if arguments.get(name) is not None]:
            raise UnsupportedModelError(
                f"{other[0]}: cross-attention is not supported, only attention to a model's own tokens"
            )
        cache = cache_for(own, self._kv, self._make)
        with cache.forward():
            out = self._run(self._forward, cache, arguments | {self.cache_name: cache})
        if own is not None:
            cache.replace_layers(own)
        return _replace_cache(out, self.cache_name, cache if own is None else own, arguments)


def _replace_cache(out: Any, name: str, cache: Cache, arguments: dict[str, Any]) -> Any:
    """Output of a forward with the caller's cache in it."""
    if isinstance(out, tuple):
        return tuple(cache if isinstance(output, KvCache) else output for output in out)
    out[name] = cache
    return out.to_tuple() if arguments.get("return_dict") is False else out


def _run_in_drives(forward: Callable[..., Any], most: int, cache: KvCache, arguments: dict[str, Any]) -> Any:
    """Run a forward whose attention is in drives, in at most `most` micro-batches."""
    ids = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    assert ids is not None and cache.kv.drives, "a forward has input_ids or inputs_embeds"
    drives, (batch, new), past = cache.kv.drives, ids.shape[:2], cache.get_seq_length()
    traffic = drives.driver.traffic
    if new > 1 or not past:
        before = traffic.link_bytes
        out = forward(**arguments)
        cache.finish(past)
        cache.kv.settle(cache.requests)
        if past:
            traffic.count_read_back(batch * new, traffic.link_bytes - before)
        return out
    count = min(most, batch)
    with drives.step(count) as micro_batches:
        if count == 1:
            (cache.micro_batch,) = micro_batches
            try:
                return forward(**arguments)
            finally:
                cache.micro_batch = None
        cuts = [number * batch // count for number in range(count + 1)]
        rows = [slice(first, end) for first, end in pairwise(cuts)]
        parts = [cache.part(row, micro_batch) for row, micro_batch in zip(rows, micro_batches, strict=True)]
        arguments_of = [
            {name: _rows(name, value, part, row, batch) for name, value in arguments.items()}
            for part, row in zip(parts, rows, strict=True)
        ]
        outs = _run_micro_batches(forward, arguments_of, parts)
        cache.merge(parts)
    return _concatenate(outs)


def _run_micro_batches(
    forward: Callable[..., Any], arguments: list[dict[str, Any]], parts: list[KvCache]
) -> list[ModelOutput]:
    """Run each micro-batch in its own thread: while one waits for drives, another uses the model."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(part: KvCache, part_arguments: dict[str, Any]) -> ModelOutput:
        assert part.micro_batch is not None
        failed = True
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                out = forward(**(part_arguments | {"return_dict": True}))
            failed = False
            return out
        finally:
            part.micro_batch.leave(failed)

    with ThreadPoolExecutor(len(parts), thread_name_prefix="micro-batch") as pool:
        futures = list(map(pool.submit, [run] * len(parts), parts, arguments))
        errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, OrderBrokenError)), errors[0])
    return [future.result() for future in futures]


def _rows(name: str, value: Any, part: KvCache, rows: slice, batch: int) -> Any:
    """A micro-batch's part of an argument: tensors with a batch dimension are sliced, others are shared.

    The batch is the first dimension, except for positions along several axes, (axes, B, S).
    """
    if isinstance(value, KvCache):
        return part
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
        elif name not in CACHE_ARGUMENTS:
            raise UnsupportedModelError(
                f"output {name!r} cannot be joined from micro-batches: attach with micro_batches=1"
            )
    return type(outs[0])(**joined)
