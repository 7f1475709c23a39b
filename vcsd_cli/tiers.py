"""Options of the sizes of tiers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kv_cache.limits import TierLimits
from vcsd.config import CacheOptions
from vcsd_cli.lazy import first_given

MAX_MIB = float(1 << 30)


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


def check_limits(options: CacheOptions, tiers: TierLimitOptions) -> None:
    """Raise ValueError for limits of tiers if all KV data is in drives."""
    if options.in_drives and (option := first_given(tiers)):
        raise ValueError(f"{option}: all KV data is in drives: leave it out, or add --policy auto or another policy")
