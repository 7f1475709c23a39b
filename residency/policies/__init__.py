"""Policies by name: one file a system.

Policies of one's own are a Python file with a table POLICIES of them, or entry points of the group `vcsd.policies`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from csd_spec.tables import Tables
from residency.policies.auto import auto
from residency.policies.dual_blade import dual_blade
from residency.policies.flexgen import flexgen
from residency.policies.in_storage import in_storage
from residency.policies.preload import preload
from residency.policies.reactive import reactive
from residency.policies.split import split
from residency.policies.tutti import tutti
from residency.turn import Policy

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


_TABLES = Tables(POLICIES, "POLICIES", "vcsd.policies", _checked, "docs/residency.md")


def load_policies(file: Path | None = None) -> dict[str, Policy]:
    """Our policies, those that are installed as plug-ins, and those of a Python file, its table POLICIES.

    Raises ValueError with the reason for a file or plug-in that fails.
    """
    return _TABLES.load(file)
