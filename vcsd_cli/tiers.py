"""Options of K and V in tiers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_cache.limits import TierLimits
from kv_cache.policies import POLICIES, load_policies, moves_blocks
from kv_cache.scheduler import Policy

if TYPE_CHECKING:
    from vcsd.tiered import TierSetting

MAX_MIB = float(1 << 30)
IN_STORAGE = "in-storage"
_NAMES = ", ".join(filter(moves_blocks, POLICIES))
_HELP = f"policy that moves K and V: {_NAMES}, or FILE:NAME (default: {IN_STORAGE}, in drives)"


@dataclass(frozen=True, slots=True)
class InTiers:
    """Where K and V lie, instead of in drives."""

    policy: Annotated[str | None, typer.Option(help=_HELP)] = None
    device_mib: Annotated[
        float | None, typer.Option(min=0, max=MAX_MIB, help="of K and V on the model's device (default: any)")
    ] = None
    host_mib: Annotated[
        float | None, typer.Option(min=0, max=MAX_MIB, help="of K and V in host memory (default: any)")
    ] = None
    page_cache_mib: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_MIB, help="of files that the kernel keeps (default: what is left)"),
    ] = None
    files: Annotated[
        Path | None, typer.Option(help="folder, block or NVMe character device (default: of temporary files)")
    ] = None
    policies: Annotated[Path | None, typer.Option(help="Python file with policies of your own")] = None
    force: Annotated[bool, typer.Option("--force", help="write to a device that holds something")] = False
    residency: Annotated[str | None, typer.Option(hidden=True, help="former name of --policy")] = None

    def renamed(self) -> InTiers:
        """The same with --policy for its former name, which is deprecated; raises ValueError for both."""
        if self.residency is None:
            return self
        if self.policy is not None:
            raise ValueError("--residency is the former name of --policy: give --policy alone")
        typer.echo("vcsd: warning: --residency is now --policy", err=True)
        return replace(self, policy=self.residency, residency=None)

    def value(self) -> TierSetting | None:
        """The options as one value; None where K and V are in drives."""
        sizes = (self.device_mib, self.host_mib, self.page_cache_mib)
        if self.policy in (None, IN_STORAGE):
            if self.policy is None and any(each is not None for each in (*sizes, self.files, self.policies)):
                raise ValueError(f"tiers have no effect in drives: add --policy POLICY ({_NAMES})")
            return None
        known = load_policies(self.policies)
        moving = [name for name, given in known.items() if Policy.of(given).has_layers]
        if self.policy not in moving and ":" not in self.policy:
            raise ValueError(f"policy = {self.policy!r}: must be one of {', '.join(moving)}, or FILE:NAME")
        device, host, cache = (None if mib is None else int(mib * 2**20) for mib in sizes)
        tiers = TierLimits(device, host, cache, self.files, force=self.force)
        from vcsd.tiered import TierSetting

        return TierSetting(policy=self.policy, tiers=tiers, policies=known, record=True)
