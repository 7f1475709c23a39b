"""Operator settings of the prefix cache, as an engine passes them: names and values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from csd_link.connect import Connect, connect, open_window
from csd_link.run_dir import window_path
from csd_link.served_drive import DEFAULT
from csd_spec.checked import Count, frozen_value
from host_driver.prefixes.identity import Check

_Optional = Annotated[int, Field(ge=0, le=1 << 31)]


@frozen_value
class Settings:
    """Settings of an engine that stores prefixes in drives.

    Attributes:
        drives: Names of served drives, or paths of windows on a device; they share the KV heads.
        tenant: Tenant of the windows; one engine at a time uses a tenant's window.
        salt: Secret of all keys.
        seed: Seed of all keys; a new value starts with nothing stored.
        block_tokens: Tokens per block; 0: chosen by the engine's block size.
        max_blocks: Maximum number of stored blocks; 0: as many as fit.
        admit_after: Number of requests for a block before it is stored.
        stores_in_flight: Maximum number of queued stores; further ones are dropped.
        weights: Identification of the model's files: `sampled` or `content` (`host_driver.prefixes.identity`).
        identity: Text that replaces the files, for weights that are not in a folder on this machine.
    """

    drives: Annotated[tuple[str, ...], Field(min_length=1)]
    tenant: str = DEFAULT
    salt: str = ""
    seed: int = 0
    block_tokens: _Optional = 0
    max_blocks: _Optional = 0
    admit_after: Count = 1
    stores_in_flight: Count = 8
    weights: Check = "sampled"
    identity: str = ""

    def share(self, worker: int, workers: int) -> tuple[str, ...]:
        """Drives of one of several workers; raises ValueError if they cannot be divided evenly."""
        if len(self.drives) % workers:
            raise ValueError(f"{len(self.drives)} drives for {workers} workers: must be a multiple of the workers")
        count = len(self.drives) // workers
        return self.drives[worker * count : (worker + 1) * count]

    def connects(self, worker: int = 0, workers: int = 1) -> list[Connect]:
        """Functions that connect to a worker's drives."""
        return [_connect(name, self.tenant) for name in self.share(worker, workers)]


def _connect(name: str, tenant: str) -> Connect:
    if "/" in name:
        return partial(open_window, Path(name))
    return partial(connect, window_path(name, tenant))
