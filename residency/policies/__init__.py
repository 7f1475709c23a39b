"""Policies by name: one file a system."""

from __future__ import annotations

from residency.policies.dual_blade import dual_blade
from residency.policies.flexgen import flexgen
from residency.policies.in_storage import in_storage
from residency.policies.reactive import reactive
from residency.policies.split import split
from residency.turn import Policy

POLICIES: dict[str, Policy] = {
    "reactive": reactive,
    "flexgen": flexgen,
    "dual-blade": dual_blade,
    "split": split,
    "in-storage": in_storage,
}
