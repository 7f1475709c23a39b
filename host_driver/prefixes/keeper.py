"""Loads and stores of prefixes beside a server's own work: in a thread, within bounds, whatever drives do."""

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
from csd_spec import Device, DeviceError, Status
from csd_spec.arrays import F16
from host_driver.prefixes.names import PrefixNames
from host_driver.prefixes.store import PrefixStore

Rows = tuple[F16, F16]  # k, v, each (layers, tokens, kv_heads, d)
RETRY_S = 0.5  # between two attempts to reach drives that are gone
COUNTS = {
    "loads": "loads of a prefix",
    "loaded_tokens": "tokens whose K and V were loaded",
    "loads_failed": "loads of which nothing came",
    "load_us": "wall time of loads, in microseconds",
    "stores": "stores that were taken on",
    "stores_dropped": "stores that were dropped, as too many waited or drives were gone",
    "stores_failed": "stores that drives refused, or that found no room",
    "stored_blocks": "blocks that are new",
    "store_us": "wall time of stores, in microseconds",
    "evicted_blocks": "blocks that went for newer ones",
    "rejected": "blocks that were not what was stored",
    "drives_lost": "times that drives were gone",
}
_LOG = logging.getLogger("vcsd")


class Keeper:
    """A `PrefixStore` that nobody waits for.

    Loads come first, stores are done when nothing is to be loaded, and flushed when nothing is to be stored. A store
    that finds as many waiting as may wait is dropped. When drives are gone, nothing is found until they are back; what
    they have kept is found again then. A window that another host has taken is left to it. Methods may be called from
    any thread.
    """

    def __init__(self, open_store: Callable[[], PrefixStore], stores_in_flight: int = 8) -> None:
        """open_store: connects to the drives; OSError or DeviceError where they do not answer: raised here, but not
        later. stores_in_flight: stores that may wait; each holds its rows in memory."""
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
        """K and V of the longest prefix that is stored, from token `first` on; None where nothing could be read."""
        future = Future[Rows | None]()
        self._ask(future, lambda: self._load(future, keys, first), None)
        return future

    def store(self, keys: Sequence[bytes], rows: Callable[[], Rows], first: int = 0) -> bool:
        """Keep a prompt's blocks from token `first` on; False where that is dropped, and `rows` is not called."""
        with self._wake:
            if self._store is None or self._closing or len(self._stores) >= self._most:
                self._counts["stores_dropped"] += 1
                return False
        k, v = rows()
        with self._wake:
            taken = not self._closing  # else nobody may be left to carry it out
            self._counts["stores" if taken else "stores_dropped"] += 1
            if taken:
                self._stores.append(lambda: self._keep(keys, k, v, first))
                self._wake.notify()
        return taken

    def remove(self, keys: Sequence[bytes]) -> Future[bool]:
        """`PrefixStore.remove`; it does not wait for stores."""
        future = Future[bool]()
        self._ask(future, lambda: self._remove(future, keys), False)
        return future

    def _ask(self, future: Future[Any], job: Callable[[], None], closed: Any) -> None:
        """Have a job done before stores; once this is closed its future has a value at once."""
        with self._wake:
            if self._closing:
                future.set_result(closed)
                return
            self._loads.append(job)
            self._wake.notify()

    def pin(self, keys: Sequence[bytes]) -> bool:
        """Keep these blocks until they are unpinned as often, or drives are lost; False where they are gone."""
        with self._wake:
            if self._store:
                self._store.pin(keys)
            return self._store is not None

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """They may go again."""
        with self._wake:
            if self._store:
                self._store.unpin(keys)
            return self._store is not None

    def take_changes(self) -> dict[bytes, bool]:
        """Keys that can be loaded now (True), or no more, since this was last asked; at first all that are stored."""
        with self._wake:
            taken, self._changes = self._changes, {}
        return taken

    def take_counts(self) -> dict[str, int]:
        """What was done since this was last asked, as far as there was any: `COUNTS`."""
        with self._wake:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def close(self) -> None:
        """Carry out what waits, let it survive a loss of power, and let the drives go."""
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
            except Exception:  # else whoever waits for the next load would wait forever
                _LOG.exception("prefixes: what should not happen; what is stored is looked up anew")
                self._lose("an error of this program")

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
        began, found = time.perf_counter_ns(), None
        try:
            found = self._store.load(keys, first) if self._store else None
        except (DeviceError, OSError) as error:
            self._lose(str(error))
        finally:
            tokens = found[0].shape[1] if found else 0
            self._count(began, "load_us", loads=1, loaded_tokens=tokens, loads_failed=int(found is None))
            future.set_result(found)

    def _keep(self, keys: Sequence[bytes], k: F16, v: F16, first: int) -> None:
        began, new, failed = time.perf_counter_ns(), 0, 0
        try:
            if self._store:
                new = self._store.store(keys, k, v, first)
        except ValueError as error:  # no room beside what is in use
            failed = 1
            _LOG.debug("prefixes: %s", error)
        except (DeviceError, OSError) as error:
            failed = 1
            if not isinstance(error, DeviceError) or error.status is Status.PATH_LOST:
                self._lose(str(error))
            else:
                _LOG.warning("prefixes: not stored: %s", error)
        self._unflushed |= new > 0
        self._count(began, "store_us", stored_blocks=new, stores_failed=failed)

    def _remove(self, future: Future[bool], keys: Sequence[bytes]) -> None:
        went = False
        try:
            went = bool(self._store and self._store.remove(keys))
            self._note_changes()
        except (DeviceError, OSError) as error:
            self._lose(str(error))
        finally:
            future.set_result(went)

    def _flush(self) -> None:
        self._unflushed = False
        try:
            if self._store:
                self._store.flush()
        except (DeviceError, OSError) as error:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        """Drives are gone: nothing is found until they are back."""
        lost, self._store = self._store, None
        if lost:
            self._taken = any(isinstance(getattr(each, "lost", None), TakenError) for each in lost.devices)
            _close(lost.devices)
        again = "this engine starts again" if self._taken else "the drives answer"
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
        except (DeviceError, OSError) as error:
            _LOG.debug("prefixes: %s", error)
            return
        self._note_changes()
        _LOG.warning("prefixes: drives answer again, with %d blocks", self._store.blocks)

    def _count(self, began_ns: int, spent: str, **counts: int) -> None:
        self._note_changes()
        with self._wake:
            self._counts.update({spent: (time.perf_counter_ns() - began_ns) // 1000} | counts)

    def _note_changes(self) -> None:
        """What has come and gone in the store, before anyone hears of the command that has changed it."""
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
    """A store over drives that others serve; OSError or DeviceError where they do not answer."""
    devices: list[Device] = []
    try:
        for connect in connects:
            devices.append(connect())
        store = PrefixStore(devices, names, max_blocks)
        _LOG.info("prefixes: %s, identity %s: %d blocks", names.model.name, names.model.digest, store.blocks)
        return store
    except (DeviceError, OSError):
        _close(devices)
        raise


def _close(devices: Sequence[Device]) -> None:
    for device in devices:
        try:
            device.close()
        except OSError as error:
            _LOG.debug("prefixes: %s", error)
