"""KV cache management for running requests: block tables, tiers, transfers, scheduling and iteration times."""

from __future__ import annotations

from kv_cache.admission import AdmissionConfig
from kv_cache.block_table import BlockKey, BlockTable, PolicyError, Transfer
from kv_cache.cost import CostModel, DriveModel, Overlay, ServingCost
from kv_cache.engine import Engine
from kv_cache.hardware import CSD, DEVICE, DIRECT, HOST, PAGE_CACHE, Machine, Route, SharedLink, Tier
from kv_cache.iteration import Iteration, IterationRunner, Program, TierAssignment
from kv_cache.metrics import RunResult, summary
from kv_cache.planner.problem import Offload, blocks_on_device
from kv_cache.policies import POLICIES, load_policies
from kv_cache.request import SequenceState
from kv_cache.scheduler import IterationResult, Policy, SchedulerOutput, SchedulerState
from kv_cache.simulation import simulate
from kv_cache.trace import Request, Trace, generate
from kv_cache.trace_file import load
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

__all__ = [
    "CSD",
    "DEVICE",
    "DIRECT",
    "HOST",
    "PAGE_CACHE",
    "POLICIES",
    "AdmissionConfig",
    "BlockKey",
    "BlockTable",
    "CostModel",
    "DriveModel",
    "Engine",
    "Iteration",
    "IterationResult",
    "IterationRunner",
    "LayerTime",
    "Machine",
    "Offload",
    "Overlay",
    "Policy",
    "PolicyError",
    "Program",
    "Request",
    "Route",
    "RunResult",
    "SchedulerOutput",
    "SchedulerState",
    "SequenceState",
    "ServingCost",
    "SharedLink",
    "SimulatedTransfers",
    "Tier",
    "TierAssignment",
    "Trace",
    "Transfer",
    "blocks_on_device",
    "generate",
    "load",
    "load_policies",
    "simulate",
    "summary",
]
