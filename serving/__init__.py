"""Serving under load: requests that come and go, where their K and V lie meanwhile, and what they wait for."""

from __future__ import annotations

from serving.admission import Admission
from serving.engine import Drives, Engine
from serving.loop import Decision, Live, Policy, Served, Situation, serve
from serving.metrics import summary
from serving.placement import Costs, Option, Placement, Problem, blocks_on_device
from serving.policies import POLICIES, Planner
from serving.trace import Request, Trace, generate, load

__all__ = [
    "POLICIES",
    "Admission",
    "Costs",
    "Decision",
    "Drives",
    "Engine",
    "Live",
    "Option",
    "Placement",
    "Planner",
    "Policy",
    "Problem",
    "Request",
    "Served",
    "Situation",
    "Trace",
    "blocks_on_device",
    "generate",
    "load",
    "serve",
    "summary",
]
