"""A worker's side: loads and stores of an engine's paged cache by a `Keeper`."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from host_driver.prefixes.keeper import Keeper, Rows
from vcsd.integrations.paged import PagedCache
from vcsd.integrations.plan import Load, Plan


class Working:
    """What is read from drives is put into the cache by the engine's own thread, between two iterations."""

    def __init__(self, keeper: Keeper, block_tokens: int) -> None:
        """block_tokens: of the engine's cache."""
        self.keeper, self._block_tokens = keeper, block_tokens
        self.cache: PagedCache | None = None
        self._loading: list[tuple[Load, Future[Rows | None]]] = []
        self._failed: set[int] = set()

    def start(self, plan: Plan) -> None:
        """Begin a plan's loads."""
        self._loading += [(load, self.keeper.load(load.keys, load.first)) for load in plan.loads]

    def save(self, plan: Plan) -> None:
        """Hand over what a plan wants stored: a copy, so that the engine may use its blocks again at once."""
        assert self.cache is not None, "the engine registers its cache before its first iteration"
        for save in plan.saves:
            self.keeper.store(save.keys, partial(self.cache.read, save.blocks), save.first)

    def finish(self) -> set[str]:
        """Requests whose loads have ended since; what came is in the cache."""
        ended = [each for each in self._loading if each[1].done()]
        self._loading = [each for each in self._loading if each not in ended]  # others may have ended by now
        for load, future in ended:
            self._put(load, future.result())
        return {load.request for load, _ in ended}

    def _put(self, load: Load, rows: Rows | None) -> None:
        """As many whole blocks as came; the others have failed."""
        assert self.cache is not None
        came = min(rows[0].shape[1] // self._block_tokens, len(load.blocks)) if rows else 0
        if rows and came:
            self.cache.write(load.blocks[:came], *(part[:, : came * self._block_tokens] for part in rows))
        self._failed.update(load.blocks[came:])

    def take_failed(self) -> set[int]:
        """Blocks of the cache that nothing was put into, since this was last asked."""
        taken, self._failed = self._failed, set()
        return taken
