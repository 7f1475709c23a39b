"""Values of a tenant by key, for NVMe's Key Value commands: byte strings under keys of 1 to 16 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice

from csd_firmware.handlers import check_tables
from csd_firmware.objects import check_names, max_names
from csd_firmware.quotas import check_use, max_pages, max_sequences
from csd_firmware.step import Firmware, status_of
from csd_firmware.tenants import label_of
from csd_link.served_drive import DEFAULT
from ftl import FtlError, KeyExistsError, UnknownKeyError
from ftl.kv.sequence import Sequence
from ftl.kv.usage import Usage, table_bytes, usage_of
from ftl.kv.values import VALUES, form_of_values, rows_of

MAX_VALUE_BYTES = 4 << 20  # a store is one turn of the lock, for which other tenants wait
MAX_KEY_BYTES = 16


class Values:
    """One tenant's values. A key is identified by its bytes and length; it never collides with a prefix's name.

    A request is submitted at the drive's clock. A store ends when its pages are in flash, and is
    durable after the next flush. After an earlier power loss, an overwritten value is entirely the old or the new one.
    """

    def __init__(
        self, firmware: Firmware, tenant: str = DEFAULT, turns: AbstractContextManager[object] | None = None
    ) -> None:
        """`tenant` is its name, which also determines its quota; `turns` is entered for each request."""
        self._firmware, self._ftl, self._state = firmware, firmware.ftl, firmware.state
        self._tenant, self._turn = label_of(tenant), turns or nullcontext()
        self._label = self._tenant | VALUES
        self._now_ns = 0  # simulated time that the running request has reached
        self._page_bytes = firmware.spec.geometry.page_bytes
        self.granularity_bytes = 2 * self._page_bytes

    @property
    def size_bytes(self) -> int:
        """Flash capacity available to the tenant's sequences and values, bytes."""
        return self._limit(max_pages(self._state)) * self._page_bytes

    @property
    def used_bytes(self) -> int:
        """Flash used by its values, bytes."""
        return self._ftl.kv.usage.of(self._label).pages * self._page_bytes

    @property
    def max_value_bytes(self) -> int:
        """Maximum size of a value, bytes."""
        return min(MAX_VALUE_BYTES, self.size_bytes)

    @property
    def max_keys(self) -> int:
        """Maximum number of values, if the tenant has no sequences."""
        return min(self._limit(max_sequences()), self._limit(max_names(self._state)))

    def _limit(self, whole: int) -> int:
        quota = self._state.quotas.get(self._tenant)
        return int(whole * quota.share) if quota else whole

    def store(
        self, key: bytes, value: bytes | bytearray | memoryview, must_exist: bool = False, must_be_new: bool = False
    ) -> None:
        """Store a value, replacing an existing one.

        Raises:
            UnknownKeyError: The key must exist, and does not.
            KeyExistsError: The key must be new, and exists.
            FtlError: There is no space, or the drive cannot be written; the old value is unchanged.
        """
        with self._request("Store", len(value)):
            old = self._ftl.kv.names.holder(self._label, key)
            if must_exist and old is None:
                raise UnknownKeyError(f"no value is stored under key {key.hex()}")
            if must_be_new and old is not None:
                raise KeyExistsError(f"a value is already stored under key {key.hex()}")
            self._check_room(len(value), old)
            handle, self._now_ns = self._ftl.store_value(self._label, key, value, self._now_ns)
            self._state.open(handle)
            if old is not None:
                assert not old.names, f"key {key.hex()} names its old value, too"
                self._free(old)

    def _check_room(self, size_bytes: int, old: Sequence | None) -> None:
        """Raise OutOfSpaceError if the drive, or the tenant's quota, has no room for a value."""
        tables, pages = table_bytes(1, 1, form_of_values(self._page_bytes)), rows_of(size_bytes, self._page_bytes)
        wanted = Usage(1, tables, 2 * pages)
        if old is not None:
            wanted.add(usage_of(old, old.lengths.tolist()), -1)
        check_use(self._state, self._tenant, wanted, int(old is None))
        check_tables(self._state, 1, tables)
        check_names(self._state, int(old is None))

    def retrieve(self, key: bytes, size_bytes: int = MAX_VALUE_BYTES) -> tuple[bytes, int]:
        """Return the first `size_bytes` of a value (or all, if it is shorter), and its size in bytes.

        Raises:
            UnknownKeyError: The key does not exist.
            UncorrectableReadError: The value is lost.
        """
        with self._turn:
            seq = self._holder(key)
            start_ns, size = self._firmware.now_ns, seq.names[key]
            data, ready_ns = self._ftl.read_value(seq.handle, min(size, size_bytes), start_ns)
            finish_ns = self._firmware.cross_link("out", len(data), ready_ns) + self._firmware.spec.link.command_ns
            self._firmware.record("Retrieve", start_ns, finish_ns, reads=True, nbytes=len(data))
        return data, size

    def exist(self, key: bytes) -> int:
        """Return the size of a value, bytes; raises UnknownKeyError."""
        with self._turn:
            return self._holder(key).names[key]

    def delete(self, key: bytes) -> None:
        """Delete a value; raises UnknownKeyError, or FtlError if the drive has failed."""
        with self._request("Delete", 0):
            self._free(self._holder(key))

    def keys(self, first: bytes = b"", count: int = 1 << 32) -> list[bytes]:
        """Return at most `count` keys >= `first`, in byte order."""
        with self._turn:
            names = self._ftl.kv.names
            here = [first] if names.holder(self._label, first) else []
            return list(islice(chain(here, names.keys_after(self._label, first)), count))

    def flush(self) -> None:
        """Make earlier changes durable; raises FtlError if the drive has failed."""
        with self._request("Flush", 0):
            self._now_ns = self._ftl.flush(self._now_ns)

    def _holder(self, key: bytes) -> Sequence:
        sequence = self._ftl.kv.names.holder(self._label, key)
        if sequence is None:
            raise UnknownKeyError(f"no value is stored under key {key.hex()}")
        return sequence

    def _free(self, seq: Sequence) -> None:
        self._ftl.free([seq.handle], self._now_ns)
        self._state.close(seq.handle)

    @contextmanager
    def _request(self, name: str, size_bytes: int) -> Iterator[None]:
        """Run a change of `size_bytes` from the host: takes the lock, and records the request or its error.

        An unexpected exception fails the drive.
        """
        with self._turn:
            firmware = self._firmware
            start_ns = firmware.now_ns
            try:
                with firmware.failing(name):
                    self._now_ns = firmware.cross_link("in", size_bytes, start_ns) + firmware.spec.link.command_ns
                    yield
            except (UnknownKeyError, KeyExistsError):
                raise
            except FtlError as error:
                firmware.refuse(name, status_of(error), str(error), start_ns)
                raise
            firmware.record(name, start_ns, self._now_ns, writes=name == "Store", nbytes=size_bytes)
