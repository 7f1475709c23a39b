"""Options of a KV cache in tiers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_cache.limits import TierLimits
from kv_cache.policies import POLICIES, load_policies, moves_blocks
from kv_cache.scheduler import Policy

if TYPE_CHECKING:
    from vcsd.tiered import TierConfig

MAX_MIB = float(1 << 30)
IN_STORAGE = "in-storage"
_NAMES = ", ".join(filter(moves_blocks, POLICIES))
_HELP = f"placement policy: {_NAMES}, or FILE:NAME (default: {IN_STORAGE}, in drives)"


@dataclass(frozen=True, slots=True)
class TierLimitOptions:
    """Limits of tiers."""

    device_mib: Annotated[
        float | None,
        typer.Option(
            "--device-kv-mib", min=0, max=MAX_MIB, help="KV cache on the model's device, MiB (default: unlimited)"
        ),
    ] = None
    host_mib: Annotated[
        float | None,
        typer.Option("--host-kv-mib", min=0, max=MAX_MIB, help="KV cache in host memory, MiB (default: unlimited)"),
    ] = None
    page_cache_mib: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_MIB, help="page cache for files, MiB (default: free memory)"),
    ] = None
    files: Annotated[
        Path | None,
        typer.Option("--files", help="folder, block or NVMe character device (default: temporary folder)"),
    ] = None
    allow_overwrite: Annotated[bool, typer.Option(help="write to a device that is not empty")] = False

    def limits(self) -> TierLimits:
        """Limits of the options."""
        sizes = (self.device_mib, self.host_mib, self.page_cache_mib)
        device, host, cache = (None if mib is None else int(mib * 2**20) for mib in sizes)
        return TierLimits(device, host, cache, self.files, allow_overwrite=self.allow_overwrite)


@dataclass(frozen=True, slots=True)
class TierOptions(TierLimitOptions):
    """Options of a KV cache in tiers instead of drives."""

    policy: Annotated[str | None, typer.Option(help=_HELP)] = None
    policies: Annotated[Path | None, typer.Option("--policies-file", help="Python file with custom policies")] = None

    def value(self) -> TierConfig | None:
        """Configuration of the options; None if the KV cache is in drives."""
        sizes = (self.device_mib, self.host_mib, self.page_cache_mib)
        if self.policy in (None, IN_STORAGE):
            if self.policy is None and any(size is not None for size in (*sizes, self.files, self.policies)):
                raise ValueError(f"tiers have no effect in drives: add --policy POLICY ({_NAMES})")
            return None
        policies = load_policies(self.policies)
        moving = [name for name, policy in policies.items() if Policy.of(policy).has_layers]
        if self.policy not in moving and ":" not in self.policy:
            raise ValueError(f"policy = {self.policy!r}: must be one of {', '.join(moving)}, or FILE:NAME")
        tiers = self.limits()
        from vcsd.tiered import TierConfig

        return TierConfig(policy=self.policy, tiers=tiers, policies=policies, record=True)
