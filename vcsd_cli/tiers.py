"""Options of K and V in tiers."""

from __future__ import annotations

from dataclasses import dataclass
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
_HELP = f"who moves K and V: {', '.join(filter(moves_blocks, POLICIES))} (default: {IN_STORAGE}, in drives)"


@dataclass(frozen=True, slots=True)
class InTiers:
    """Where K and V lie, instead of in drives."""

    residency: Annotated[str | None, typer.Option(help=_HELP)] = None
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

    def value(self) -> TierSetting | None:
        """The options as one value; None where K and V are in drives."""
        sizes = (self.device_mib, self.host_mib, self.page_cache_mib)
        if self.residency in (None, IN_STORAGE):
            if self.residency is None and any(each is not None for each in (*sizes, self.files, self.policies)):
                raise ValueError("tiers are given and nobody who uses them: say with --residency who moves K and V")
            return None
        known = load_policies(self.policies)
        moving = [name for name, given in known.items() if Policy.of(given).has_layers]
        if self.residency not in moving:
            raise ValueError(f"residency = {self.residency!r}: must be one of {', '.join(moving)}")
        device, host, cache = (None if mib is None else int(mib * 2**20) for mib in sizes)
        tiers = TierLimits(device, host, cache, self.files, force=self.force)
        from vcsd.tiered import TierSetting

        return TierSetting(policy=self.residency, tiers=tiers, policies=known, record=True)
