"""`vcsd.serve`: serves a model with a policy, tiers and drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field, SkipValidation
from transformers import PreTrainedModel

from csd_io.cgroup import available_bytes, cgroup_of
from csd_link.driveset import DriveSetConfig
from csd_spec import AttentionConfig, Drive, ModelShape
from csd_spec.checked import frozen_value
from host_driver.driver import Driver
from host_driver.hf.rows import RowModel, in_rows
from host_driver.hf.shape import placement, unwrapped
from host_driver.kv_format import KVFormat
from host_driver.kv_table import KvTable
from host_driver.sharding import assign_heads
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, DenseDecoder, DriveModel, ServingCost
from kv_cache.engine import Engine
from kv_cache.hardware import CSD, H100
from kv_cache.limits import TierLimits
from kv_cache.planner.problem import BLOCK_TOKENS
from kv_cache.policies import PolicyLike, policy_of
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.simulation import UNLIMITED, levels_of
from kv_cache.transfer.sequences import SequenceStore
from vcsd.home_stack import HomeStack
from vcsd.options import ServingLimits
from vcsd.server import Server
from vcsd.tiered import MAX_TOKENS, context_of
from vcsd.transport import check_method, methods_of, open_drives

# Assumed cost model without a measured one: an H100, a PCIe 4 x16 link, and these drives
FETCH_BYTES_PER_S, DRIVE_BYTES_PER_S, CALL_S = 25e9, 6e9, 20e-6

PATIENCE = 64  # iterations after which a paused request is scheduled first


@frozen_value
class ServingConfig(ServingLimits):
    """Configuration of `vcsd.serve`.

    Attributes:
        policy: A name of `kv_cache.POLICIES`, FILE:NAME, or a policy object (docs/policies.md).
        tiers: Limits of the KV cache by tier.
        drives: Drives for layers that are attended there; none if the policy does not use drives.
        attention: Method of the drives.
        cost: Cost model of the policy instead of an H100's; its device memory follows from the tiers.
        slo_scale: Objective, as a multiple of the step of the longest request that fits.
        replan_on_drift: Plan again if measured steps deviate from the cost model; decisions are then not reproducible.
    """

    policy: SkipValidation[str | PolicyLike] = "orbitflow"
    tiers: TierLimits = TierLimits()
    drives: SkipValidation[DriveSetConfig | Sequence[Drive] | int] = ()
    attention: AttentionConfig | str = AttentionConfig.named("dense")
    cost: ServingCost | None = None
    slo_scale: Annotated[float, Field(gt=0)] = 1.5
    replan_on_drift: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.attention, str):
            object.__setattr__(self, "attention", AttentionConfig.named(self.attention))
        if isinstance(self.drives, int) and not isinstance(self.drives, bool):
            object.__setattr__(self, "drives", DriveSetConfig(count=self.drives) if self.drives else ())
        if not isinstance(self.drives, DriveSetConfig | Sequence) or isinstance(self.drives, str):
            raise ValueError(f"drives = {self.drives!r}: must be a whole number, a DriveSetConfig, or devices")
        policy = policy_of(self.policy)
        if isinstance(policy, TimeSlices) and policy.free:
            raise ValueError(f"policy = {self.policy!r}: a bound in simulated time, which cannot serve: choose another")
        if CSD in policy.tiers and not self.count:
            raise ValueError(f"policy = {self.policy!r}: attends in drives: set drives to at least 1")

    @property
    def count(self) -> int:
        """Number of drives."""
        if isinstance(self.drives, int):
            return self.drives
        return self.drives.count if isinstance(self.drives, DriveSetConfig) else len(self.drives)

    def engine(self, shape: ModelShape, row_bytes: int, max_tokens: int, parameters: float) -> Engine:
        """Create the engine with the policy and the available memory.

        Args:
            shape: The model's attention.
            row_bytes: Bytes of the KV cache per token and layer.
            max_tokens: Maximum length of a request, tokens.
            parameters: Number of parameters of the model.
        """
        cost = self.cost or default_performance_model(shape, row_bytes, self.count, parameters)
        if cost.layers != shape.layers:
            raise ValueError(f"cost.layers = {cost.layers}: the model has {shape.layers}")
        token_bytes = shape.layers * row_bytes
        device = UNLIMITED if self.tiers.device is None else self.tiers.device
        policy = policy_of(self.policy)
        admission = AdmissionConfig(
            max_batch_size=self.max_batch_size,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            max_paused_steps=PATIENCE,
        )
        if isinstance(policy, TimeSlices):
            policy.slice_tokens = self.time_slice_tokens
            levels = levels_of(replace(cost, token_bytes=row_bytes), self.tiers, max_tokens)
            return Engine(policy, cost, admission=admission, store=SequenceStore(levels))
        room = max(0, device - max_tokens * row_bytes)  # less one layer of a request in prefill
        fits = replace(cost, room_blocks=max(1, room // (token_bytes * BLOCK_TOKENS)))
        return Engine(policy, fits, fits.slo_s(self.slo_scale), admission, longest_tokens=max_tokens)


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


@contextmanager
def serve(
    model: PreTrainedModel, serving: ServingConfig = ServingConfig(), background: bool = True
) -> Iterator[Server]:
    """Serve requests with a model until the block ends, then restore the model.

    Args:
        model: A transformers decoder.
        serving: Configuration.
        background: Run iterations in a thread; otherwise they run in the thread that iterates over a stream or calls
            `Server.step`.

    Raises:
        ValueError: (UnsupportedModelError) The model or the configuration is not supported.
    """
    model = unwrapped(model)
    shape = placement(model).shape
    context = context_of(model)
    max_tokens = serving.max_tokens or min(context, MAX_TOKENS)
    if max_tokens > context:
        raise ValueError(f"max_tokens = {max_tokens}: the model's context is {context}")
    tiers = serving.tiers
    if tiers.page_cache is None:
        tiers = replace(tiers, page_cache=available_bytes(cgroup_of()))
    with HomeStack() as undo:
        driver = undo.enter_context(_driver(serving, shape, model.dtype)) if serving.count else None
        undo.enter_context(in_rows(model))
        like = next(model.parameters())
        kv_format = KVFormat.of(shape, like.dtype, driver.attention if driver else None)
        engine = serving.engine(shape, kv_format.row_bytes, max_tokens, model.num_parameters())
        kv = KvTable.for_requests(tiers, shape, like, max_tokens, driver, engine.policy)
        server = Server(RowModel(model, kv), engine, max_tokens, serving.max_queued_requests, serving.replan_on_drift)
        undo.callback(server.close)
        if background:
            server.start()
        yield server


@contextmanager
def _driver(serving: ServingConfig, shape: ModelShape, dtype: torch.dtype) -> Iterator[Driver]:
    """Open the drives and create their driver. `dtype`: the model's dtype."""
    assign_heads(shape, serving.count)
    drives, attention = serving.drives, serving.attention
    assert isinstance(attention, AttentionConfig) and not isinstance(drives, int), "converted in __post_init__"
    attention = attention.for_model_dtype(dtype is torch.bfloat16, shape.latent)
    with ExitStack() as undo:
        if isinstance(drives, DriveSetConfig):
            check_method(attention, methods_of(drives))
            devices = undo.enter_context(open_drives(drives))
        else:
            devices = list(drives)
        driver = Driver(devices, shape, attention)
        undo.callback(driver.close)
        yield driver
