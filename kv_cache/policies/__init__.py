"""Policies by name, one file per system.

`Policy.of(POLICIES[name])` creates one. A policy has state, so each engine has its own instance. Further policies come
from a Python file with a table POLICIES, or from entry points of the group `vcsd.policies`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from csd_spec.tables import Tables
from kv_cache.policies.auto import Auto
from kv_cache.policies.dual_blade import DualBlade
from kv_cache.policies.flexgen import FlexGen
from kv_cache.policies.in_storage import InStorage, InTwoPlaces
from kv_cache.policies.infinigen import InfiniGen
from kv_cache.policies.layerkv import LayerKv
from kv_cache.policies.orbitflow import DeepSpeed, FlexGenHalf, FlexGenPlus, Heuristic, OrbitFlow, SloAware
from kv_cache.policies.preload import Preload
from kv_cache.policies.reactive import Reactive
from kv_cache.policies.split import Split
from kv_cache.policies.tierkv import Lfu, Lru, Mended, Oracle, Static, TierKv
from kv_cache.policies.tutti import Tutti
from kv_cache.policies.vllm import Vllm
from kv_cache.scheduler import Policy

PolicyLike = Policy | Callable[..., Any]  # anything that `Policy.of` accepts

POLICIES: dict[str, PolicyLike] = {
    "reactive": Reactive,
    "flexgen": FlexGen,
    "dual-blade": DualBlade,
    "split": Split,
    "preload": Preload,
    "tutti": Tutti,
    "auto": Auto,
    "in-storage": InStorage,
    "in-two-places": InTwoPlaces,
    "deepspeed": DeepSpeed,
    "flexgen-half": FlexGenHalf,
    "flexgen+": FlexGenPlus,
    "slo-aware": SloAware,
    "heuristic": Heuristic,
    "vllm": Vllm,
    "layerkv": LayerKv,
    "infinigen": InfiniGen,
    "orbitflow": OrbitFlow,
    "orbitflow-strict": partial(OrbitFlow, late=0),
    "ours": partial(OrbitFlow, late=0, drives=True),
    "lru": Lru,
    "lfu": Lfu,
    "static": Static,
    "tierkv": TierKv,
    "mended": Mended,
    "oracle": Oracle,
}
"""Built-in policies, by name: classes, or `partial` of one."""


def moves_blocks(name: str) -> bool:
    """Whether a built-in policy has its own program of an iteration."""
    return Policy.of(POLICIES[name]).has_layers


def _checked(source: str, name: object, policy: Any) -> PolicyLike:
    """Check a custom policy.

    Raises:
        ValueError: The object is not a policy.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{source}: policy {name!r}: a name must be non-empty text")
    try:
        Policy.of(policy)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: policy {name}: {error}") from None
    checked: PolicyLike = policy
    return checked


def policy_of(definition: Any) -> Policy:
    """Create a policy from a name, from `FILE:NAME` (a Python file and a name in its table POLICIES), or an object.

    Raises:
        ValueError: The name is unknown, or the object is not a policy.
    """
    if not isinstance(definition, str):
        try:
            return Policy.of(definition)
        except (TypeError, ValueError) as error:
            raise ValueError(f"policy = {definition!r}: {error}") from None
    file, _, name = definition.rpartition(":")
    policies = load_policies(Path(file) if file else None)
    if name not in policies and file:
        names = [key for key in policies if policies[key] is not POLICIES.get(key)]
        raise ValueError(f"policy = {definition!r}: {file} has no policy {name!r}, it has {', '.join(names) or 'none'}")
    if name not in policies:
        raise ValueError(f"policy = {definition!r}: must be one of {', '.join(policies)}, or FILE:NAME")
    return Policy.of(policies[name])


_TABLES = Tables(POLICIES, "POLICIES", "vcsd.policies", _checked, "docs/policies.md")


def load_policies(file: Path | None = None) -> dict[str, PolicyLike]:
    """Built-in policies, those of plug-ins, and those of a Python file.

    Raises:
        ValueError: The file or a plug-in fails; the text has the reason.
    """
    return _TABLES.load(file)
