"""What an engine's operator says of the drives that keep prefixes, as engines hand it on: names and values."""

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
    """Settings of an engine that keeps prefixes in drives.

    Attributes:
        drives: Names of served drives, or paths of windows on a device; they share the KV heads.
        tenant: Whose windows; one engine at a time has a tenant's window.
        salt: Secret of all keys.
        seed: Of all keys; another one starts with nothing stored.
        block_tokens: Tokens of a block, 0 to choose by the engine's.
        max_blocks: Blocks kept, 0 for as many as fit.
        admit_after: Requests for a block before it is stored.
        stores_in_flight: Stores that may wait; more are dropped.
        weights: How the model's files are identified: `sampled` or `content` (`host_driver.prefixes.identity`).
        identity: Words in place of the files, for weights that are not in a folder of this machine.
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
        """Drives of one of several workers; raises ValueError where they do not go round."""
        if len(self.drives) % workers:
            raise ValueError(f"{len(self.drives)} drives for {workers} workers: give as many to each")
        each = len(self.drives) // workers
        return self.drives[worker * each : (worker + 1) * each]

    def connects(self, worker: int = 0, workers: int = 1) -> list[Connect]:
        """What connects to a worker's drives."""
        return [_connect(name, self.tenant) for name in self.share(worker, workers)]


def _connect(name: str, tenant: str) -> Connect:
    if "/" in name:
        return partial(open_window, Path(name))
    return partial(connect, window_path(name, tenant))
