"""`vcsd.serve`: serves a model with a policy, tiers and drives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from csd_spec import ModelShape
from host_driver.hf.rows import RowModel, in_rows
from host_driver.hf.shape import MAX_TOKENS, context_of, placement, unwrapped
from host_driver.kv_format import KVFormat
from host_driver.kv_table import KvTable
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, DenseDecoder, DriveModel, ServingCost
from kv_cache.engine import Engine
from kv_cache.hardware import H100
from kv_cache.limits import TierLimits
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.simulation import UNLIMITED, levels_of
from kv_cache.transfer.sequences import SequenceStore
from vcsd.config import ServingConfig
from vcsd.home_stack import HomeStack
from vcsd.server import Server
from vcsd.session import Session, open_driver, with_page_cache

# Assumed cost model without a measured one: an H100, a PCIe 4 x16 link, and these drives
FETCH_BYTES_PER_S, DRIVE_BYTES_PER_S, CALL_S = 25e9, 6e9, 20e-6

PATIENCE = 64  # iterations after which a paused request is scheduled first


def engine_for(
    config: ServingConfig, shape: ModelShape, row_bytes: int, max_tokens: int, parameters: float, drives: int
) -> Engine:
    """Create the engine with the policy and the available memory.

    Args:
        config: Configuration of the server.
        shape: The model's attention.
        row_bytes: Bytes of the KV cache per token and layer.
        max_tokens: Maximum length of a request, tokens.
        parameters: Number of parameters of the model.
        drives: Number of drives.
    """
    cost = config.cost or default_performance_model(shape, row_bytes, drives, parameters)
    if cost.layers != shape.layers:
        raise ValueError(f"cost.layers = {cost.layers}: the model has {shape.layers}")
    tiers, policy = config.tiers or TierLimits(), config.new_policy()
    token_bytes = shape.layers * row_bytes
    device = UNLIMITED if tiers.device is None else tiers.device
    admission = AdmissionConfig(
        max_batch_size=config.max_batch_size,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_paused_steps=PATIENCE,
    )
    if isinstance(policy, TimeSlices):
        policy.slice_tokens = config.time_slice_tokens
        levels = levels_of(replace(cost, token_bytes=row_bytes), tiers, max_tokens)
        return Engine(policy, cost, admission=admission, store=SequenceStore(levels))
    room = max(0, device - max_tokens * row_bytes)  # less one layer of a request in prefill
    fits = replace(cost, room_blocks=max(1, room // (token_bytes * BLOCK_TOKENS)))
    return Engine(policy, fits, fits.slo_s(config.slo_scale), admission, longest_tokens=max_tokens)


def default_performance_model(shape: ModelShape, row_bytes: int, drives: int, parameters: float) -> ServingCost:
    """Assumed cost model: the model on an H100."""
    token_bytes = shape.layers * row_bytes
    return ServingCost(
        name="the device",
        compute=CostModel.of(DenseDecoder(shape, parameters), H100),
        fetch_s=0.0,
        fetch_token_s=token_bytes / FETCH_BYTES_PER_S,
        room_blocks=1,
        token_bytes=row_bytes,
        drives=DriveModel(bytes_per_s=drives * DRIVE_BYTES_PER_S, token_bytes=row_bytes, call_s=CALL_S)
        if drives
        else None,
    )


def serve(
    model: PreTrainedModel, config: ServingConfig | None = None, *, background: bool = True, **options: Any
) -> AbstractContextManager[Server]:
    """Serve requests with a model until the block ends, then restore the model.

    Args:
        model: A transformers decoder.
        config: Configuration.
        background: Run iterations in a thread; otherwise they run in the thread that iterates over a stream or calls
            `Server.step`.
        options: Fields of a configuration, such as `policy="ours"`; they go before those of `config`.

    Raises:
        ValueError: (UnsupportedModelError) The model or the configuration is not supported.
    """
    config = replace(config, **options) if config else ServingConfig(**options)
    config.attention()  # an error of it is one of this call
    return _serve(unwrapped(model), config, background)


@contextmanager
def _serve(model: PreTrainedModel, config: ServingConfig, background: bool) -> Iterator[Server]:
    placed, context = placement(model), context_of(model)
    max_tokens = config.max_tokens or min(context, MAX_TOKENS)
    if max_tokens > context:
        raise ValueError(f"max_tokens = {max_tokens}: the model's context is {context}")
    with HomeStack() as undo:
        driver, methods, count = None, None, 0
        if config.has_drives:
            driver, _, methods = undo.enter_context(open_driver(model, placed.shape, config.drive_set(), config))
            undo.callback(driver.close)
            count = len(driver.devices)
        undo.enter_context(in_rows(model))
        like = next(model.parameters())
        kv_format = KVFormat.of(placed.shape, like.dtype, driver.attention if driver else None)
        engine = engine_for(config, placed.shape, kv_format.row_bytes, max_tokens, model.num_parameters(), count)
        tiers = with_page_cache(config.tiers or TierLimits())
        kv = KvTable.for_requests(tiers, placed.shape, like, max_tokens, driver, engine.policy)
        if config.record:
            kv.runner.recorded = []
        session = Session(kv, config.policy_name, placed.kinds, placed, methods)
        if driver:
            undo.callback(session.save_statistics)
        server = Server(session, RowModel(model, kv), engine, max_tokens, config)
        undo.callback(server.close)
        if background:
            server.start()
        yield server
