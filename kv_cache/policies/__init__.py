"""Policies by name: one file a system.

Policies of one's own are a Python file with a table POLICIES of them, or entry points of the group `vcsd.policies`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from csd_spec.tables import Tables
from kv_cache.iteration import Policy
from kv_cache.policies.auto import auto
from kv_cache.policies.dual_blade import dual_blade
from kv_cache.policies.flexgen import flexgen
from kv_cache.policies.in_storage import in_storage
from kv_cache.policies.preload import preload
from kv_cache.policies.reactive import reactive
from kv_cache.policies.split import split
from kv_cache.policies.tutti import tutti

POLICIES: dict[str, Policy] = {
    "reactive": reactive,
    "flexgen": flexgen,
    "dual-blade": dual_blade,
    "split": split,
    "preload": preload,
    "tutti": tutti,
    "in-storage": in_storage,
    "auto": auto,
}


def _checked(source: str, name: object, policy: Any) -> Policy:
    """A policy of somebody else's; raises ValueError for what is none."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{source}: policy {name!r}: a name is text")
    if not callable(policy):
        raise ValueError(f"{source}: policy {name}: {policy!r} is no function of a Turn")
    checked: Policy = policy
    return checked


_TABLES = Tables(POLICIES, "POLICIES", "vcsd.policies", _checked, "docs/policies.md")


def load_policies(file: Path | None = None) -> dict[str, Policy]:
    """Our policies, those that are installed as plug-ins, and those of a Python file, its table POLICIES.

    Raises ValueError with the reason for a file or plug-in that fails.
    """
    return _TABLES.load(file)
