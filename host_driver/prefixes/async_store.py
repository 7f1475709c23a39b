"""Asynchronous loads and stores of prefixes: a thread with bounded queues that survives the loss of drives."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from csd_link.connect import Connect
from csd_link.host_end import TakenError
from csd_spec import Drive, DriveError, Status
from csd_spec.arrays import F16
from host_driver.prefixes.cache_keys import PrefixNames
from host_driver.prefixes.store import PrefixStore

Rows = tuple[F16, F16]  # k, v, each (layers, tokens, kv_heads, d)
RETRY_S = 0.5  # interval between attempts to reconnect to lost drives
COUNTS = {
    "loads": "loads of a prefix",
    "loaded_tokens": "tokens whose KV data was loaded",
    "loads_failed": "loads that returned nothing",
    "load_us": "wall time of loads, microseconds",
    "stores": "accepted stores",
    "stores_dropped": "stores dropped because the queue was full or drives were lost",
    "stores_failed": "stores refused by drives, or without space",
    "stored_blocks": "new blocks stored",
    "store_us": "wall time of stores, microseconds",
    "evicted_blocks": "blocks evicted for newer ones",
    "rejected": "blocks whose content did not match its digest",
    "drives_lost": "times that drives were lost",
}
_LOG = logging.getLogger("vcsd")


class AsyncPrefixStore:
    """A `PrefixStore` with asynchronous operations.

    Loads have priority over stores, and stores over flushes. A store is dropped if the queue of stores is full. While
    drives are lost nothing is found; after they return, their stored blocks are found again. A window that another
    host has taken over is not reopened. Methods may be called from any thread.
    """

    def __init__(self, open_store: Callable[[], PrefixStore], stores_in_flight: int = 8) -> None:
        """Open the store.

        Args:
            open_store: Connects to the drives. Raises OSError or DriveError if they do not answer; here this is
                raised, later the connection is retried.
            stores_in_flight: Maximum number of queued stores; each holds its rows in memory.
        """
        if stores_in_flight < 1:
            raise ValueError(f"stores_in_flight = {stores_in_flight}: must be at least 1")
        self._open, self._most = open_store, stores_in_flight
        self._keys, self._changes, self._counts = set[bytes](), dict[bytes, bool](), Counter[str]()
        self._loads, self._stores = deque[Callable[[], None]](), deque[Callable[[], None]]()
        self._wake, self._closing, self._unflushed = threading.Condition(), False, False
        self._taken = False
        self._store: PrefixStore | None = open_store()
        self._note_changes()
        self._thread = threading.Thread(target=self._run, name="prefixes", daemon=True)
        self._thread.start()

    def load(self, keys: Sequence[bytes], first: int = 0) -> Future[Rows | None]:
        """Load KV data of the longest stored prefix from token `first` on; None if nothing could be read."""
        future = Future[Rows | None]()
        self._ask(future, lambda: self._load(future, keys, first), None)
        return future

    def store(self, keys: Sequence[bytes], rows: Callable[[], Rows], first: int = 0) -> bool:
        """Store a prompt's blocks from token `first` on; False if it is dropped (then `rows` is not called)."""
        with self._wake:
            if self._store is None or self._closing or len(self._stores) >= self._most:
                self._counts["stores_dropped"] += 1
                return False
        k, v = rows()
        with self._wake:
            taken = not self._closing  # after closing the thread may have exited
            self._counts["stores" if taken else "stores_dropped"] += 1
            if taken:
                self._stores.append(lambda: self._store_blocks(keys, k, v, first))
                self._wake.notify()
        return taken

    def remove(self, keys: Sequence[bytes]) -> Future[bool]:
        """Queue `PrefixStore.remove`; it does not wait for stores."""
        future = Future[bool]()
        self._ask(future, lambda: self._remove(future, keys), False)
        return future

    def _ask(self, future: Future[Any], job: Callable[[], None], closed: Any) -> None:
        """Queue a job with priority over stores; after closing, its future has the value `closed` at once."""
        with self._wake:
            if self._closing:
                future.set_result(closed)
                return
            self._loads.append(job)
            self._wake.notify()

    def pin(self, keys: Sequence[bytes]) -> bool:
        """Pin blocks until as many unpins or the loss of drives; False if drives are lost."""
        with self._wake:
            if self._store:
                self._store.pin(keys)
            return self._store is not None

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """Undo a pin."""
        with self._wake:
            if self._store:
                self._store.unpin(keys)
            return self._store is not None

    def take_changes(self) -> dict[bytes, bool]:
        """Keys that became loadable (True) or not (False) since the last call; at first all stored keys."""
        with self._wake:
            taken, self._changes = self._changes, {}
        return taken

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call, as far as not 0: `COUNTS`."""
        with self._wake:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def close(self) -> None:
        """Complete queued work, flush, and disconnect from the drives."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        if self._store:
            _close(self._store.devices)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - the thread must go on: callers wait for their futures
                _LOG.exception("prefixes: unexpected error; reconnecting to the drives")
                self._disconnect("internal error")

    def _next(self) -> Callable[[], None] | None:
        with self._wake:
            gone = self._store is None
            self._wake.wait_for(self._has_work, RETRY_S if gone else None)
            if self._loads:
                return self._loads.popleft()
            if self._stores:
                return self._stores.popleft()
            if self._unflushed:
                return self._flush
            return None if self._closing else self._reopen

    def _has_work(self) -> bool:
        return bool(self._loads or self._stores or self._unflushed or self._closing)

    def _load(self, future: Future[Rows | None], keys: Sequence[bytes], first: int) -> None:
        began, rows = time.perf_counter_ns(), None
        try:
            rows = self._store.load(keys, first) if self._store else None
        except (DriveError, OSError) as error:
            self._disconnect(str(error))
        finally:
            tokens = rows[0].shape[1] if rows else 0
            self._count(began, "load_us", loads=1, loaded_tokens=tokens, loads_failed=int(rows is None))
            future.set_result(rows)

    def _store_blocks(self, keys: Sequence[bytes], k: F16, v: F16, first: int) -> None:
        began, new, failed = time.perf_counter_ns(), 0, 0
        try:
            if self._store:
                new = self._store.store(keys, k, v, first)
        except ValueError as error:  # no space besides pinned blocks
            failed = 1
            _LOG.debug("prefixes: %s", error)
        except (DriveError, OSError) as error:
            failed = 1
            if not isinstance(error, DriveError) or error.status is Status.PATH_LOST:
                self._disconnect(str(error))
            else:
                _LOG.warning("prefixes: not stored: %s", error)
        self._unflushed |= new > 0
        self._count(began, "store_us", stored_blocks=new, stores_failed=failed)

    def _remove(self, future: Future[bool], keys: Sequence[bytes]) -> None:
        went = False
        try:
            went = bool(self._store and self._store.remove(keys))
            self._note_changes()
        except (DriveError, OSError) as error:
            self._disconnect(str(error))
        finally:
            future.set_result(went)

    def _flush(self) -> None:
        self._unflushed = False
        try:
            if self._store:
                self._store.flush()
        except (DriveError, OSError) as error:
            self._disconnect(str(error))

    def _disconnect(self, reason: str) -> None:
        """Disconnect from lost drives: nothing is found until they return."""
        lost, self._store = self._store, None
        if lost:
            self._taken = any(isinstance(getattr(device, "lost", None), TakenError) for device in lost.devices)
            _close(lost.devices)
        again = "this engine is restarted" if self._taken else "the drives answer"
        _LOG.warning("prefixes: %s; nothing is loaded or stored until %s", reason, again)
        with self._wake:
            self._counts["drives_lost"] += 1
            self._changes |= dict.fromkeys(self._keys, False)
            self._keys.clear()

    def _reopen(self) -> None:
        if self._store or self._taken:
            return
        try:
            self._store = self._open()
        except (DriveError, OSError) as error:
            _LOG.debug("prefixes: %s", error)
            return
        self._note_changes()
        _LOG.warning("prefixes: drives answer again, with %d blocks", self._store.blocks)

    def _count(self, began_ns: int, spent: str, **counts: int) -> None:
        self._note_changes()
        with self._wake:
            self._counts.update({spent: (time.perf_counter_ns() - began_ns) // 1000} | counts)

    def _note_changes(self) -> None:
        """Collect changes of the store before the caller gets the result of the command that caused them."""
        if self._store is None:
            return
        changes, store = self._store.take_changes(), self._store
        self._keys |= {key for key, there in changes.items() if there}
        self._keys -= {key for key, there in changes.items() if not there}
        with self._wake:
            self._changes |= changes
            self._counts.update(evicted_blocks=store.evicted, rejected=store.rejected)
        store.evicted = store.rejected = 0


def connected(connects: Sequence[Connect], names: PrefixNames, max_blocks: int | None = None) -> PrefixStore:
    """Open a store on served drives; raises OSError or DriveError if they do not answer."""
    devices: list[Drive] = []
    try:
        for connect in connects:
            devices.append(connect())
        store = PrefixStore(devices, names, max_blocks)
        _LOG.info("prefixes: %s, identity %s: %d blocks", names.model.name, names.model.digest, store.blocks)
        return store
    except (DriveError, OSError):
        _close(devices)
        raise


def _close(devices: Sequence[Drive]) -> None:
    for device in devices:
        try:
            device.close()
        except OSError as error:
            _LOG.debug("prefixes: %s", error)
