"""Worker side: loads and stores of an engine's paged cache through an `AsyncPrefixStore`."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from host_driver.prefixes.async_store import AsyncPrefixStore, Rows
from vcsd.integrations.paged import PagedCache
from vcsd.integrations.plan import PrefixLoad, PrefixPlan


class WorkerCache:
    """Loads and stores of one worker. The engine's own thread writes loaded rows to the cache between iterations."""

    def __init__(self, keeper: AsyncPrefixStore, block_tokens: int) -> None:
        """Create it for a cache with `block_tokens` tokens per block."""
        self.keeper, self._block_tokens = keeper, block_tokens
        self.cache: PagedCache | None = None
        self._loading: list[tuple[PrefixLoad, Future[Rows | None]]] = []
        self._failed: set[int] = set()

    def start(self, plan: PrefixPlan) -> None:
        """Start the loads of a plan."""
        self._loading += [(load, self.keeper.load(load.keys, load.first)) for load in plan.loads]

    def save(self, plan: PrefixPlan) -> None:
        """Queue the stores of a plan; rows are copied, so the engine may reuse its blocks at once."""
        assert self.cache is not None, "the engine registers its cache before its first iteration"
        for save in plan.saves:
            self.keeper.store(save.keys, partial(self.cache.read, save.blocks), save.first)

    def finish(self) -> set[str]:
        """Write finished loads to the cache; returns their requests."""
        ended = [entry for entry in self._loading if entry[1].done()]
        # not done(): others may finish meanwhile
        self._loading = [entry for entry in self._loading if entry not in ended]
        for load, future in ended:
            self._put(load, future.result())
        return {load.request for load, _ in ended}

    def _put(self, load: PrefixLoad, rows: Rows | None) -> None:
        """Write the loaded whole blocks to the cache; the others have failed."""
        assert self.cache is not None
        came = min(rows[0].shape[1] // self._block_tokens, len(load.blocks)) if rows else 0
        if rows and came:
            self.cache.write(load.blocks[:came], *(part[:, : came * self._block_tokens] for part in rows))
        self._failed.update(load.blocks[came:])

    def take_failed(self) -> set[int]:
        """Blocks of the cache that failed to load since the last call."""
        taken, self._failed = self._failed, set()
        return taken
