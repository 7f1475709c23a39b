"""Folder of a drive: lock, description, and completeness of its files."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from csd_io.crc import correct_single_bit, crc32
from csd_io.folder import DiskFolder, Durability, Folder, open_file, read_file
from csd_spec import DriveSpec, Geometry
from ftl.counters import Counters
from ftl.flash.files import NandFiles

LOCK, DESCRIPTION, SECRET, POWER = "lock", "drive.json", "secret.bin", "power.json"
FORMAT = 2
MAX_DESCRIPTION_BYTES = 8192  # actual descriptions are a quarter of this
_WRONG = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # errors raised for invalid descriptions
_SECRET_BYTES = 32


class FolderLock:
    """Lock of a folder, held until it is closed or the process exits.

    Args:
        path: Folder.
        shared: Allow other readers meanwhile.

    Raises:
        ValueError: Another process has the folder; the message has its PID.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        file = path / LOCK
        self._file: IO[str] | None = None
        if shared and not file.exists():
            return  # it was never opened for writing
        lock = os.fdopen(open_file(file, os.O_RDWR | (0 if shared else os.O_CREAT)), "r+")
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read().strip()
            lock.close()
            raise ValueError(f"{path}: process {holder or 'unknown'} has this drive's folder: stop it first") from None
        self._file = lock
        if not shared:
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()

    def close(self) -> None:
        """Release the lock."""
        if self._file:
            self._file.close()


class DriveFolder:
    """A drive's folder in use: locked, with a valid description and all files of its flash."""

    def __init__(self, spec: DriveSpec, path: Path, private: bool = False, durability: Durability = "process") -> None:
        """Open a folder, creating it if necessary.

        Args:
            private: Open an existing folder read-only, without the lock; the caller may hold a FolderLock.

        Raises:
            ValueError: Another process has it, it holds a drive of another geometry, or files are missing.
        """
        if not private:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = None if private else FolderLock(path)
        self.files = DiskFolder(path, durability, writable=not private)
        self._counters: Counters | None = None
        try:
            if private:
                read_drive_spec(path)
            else:
                describe(spec, path)
        except BaseException:
            self.close()
            raise

    def count_power_on(self, counters: Counters) -> None:
        """Count this power-on, and the last shutdown if it was unsafe, in a file of their own.

        Neither depends on a flush. If the file cannot be read, the counters of the last flush hold. A private folder is
        only looked at: the drive may run in another process.
        """
        opened = self._lock is not None
        try:
            power = json.loads(self.files.read(POWER))
            if power.pop("crc32") == _crc(power):
                counters.power_cycles = power["power_cycles"] + opened
                counters.unsafe_shutdowns = power["unsafe_shutdowns"] + opened * power["on"]
        except (OSError, *_WRONG):
            pass
        self._counters = counters
        self._note_power(on=True)

    def _note_power(self, on: bool) -> None:
        if self._lock and self._counters:
            counts = asdict(self._counters)
            power = {name: counts[name] for name in ("power_cycles", "unsafe_shutdowns")} | {"on": int(on)}
            with suppress(OSError):  # a failing disk fails the commands that need it
                self.files.put(POWER, json.dumps(power | {"crc32": _crc(power)}).encode())

    def close(self) -> None:
        """Close the files and release the lock."""
        self._note_power(on=False)
        self.files.close()
        if self._lock:
            self._lock.close()


def read_drive_spec(path: Path) -> DriveSpec:
    """Read the description of a folder's drive; raises ValueError if there is none."""
    return read_description(path)[0]


def read_description(path: Path) -> tuple[DriveSpec, bool]:
    """Read the description of a folder's drive.

    Returns:
        The drive, and whether the description is intact (False if one bit was corrected).
    """
    try:
        text = read_file(path / DESCRIPTION)
        try:
            values = json.loads(text)
            return DriveSpec.from_dict(_decode_description(values)), True
        except _WRONG:
            fixed = repair_description(text)
            if fixed is None:
                raise
            return DriveSpec.from_dict(_decode_description(json.loads(fixed))), False
    except (OSError, *_WRONG) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"no drive in {path}: {DESCRIPTION}: {why}") from error


def describe(spec: DriveSpec, path: Path) -> None:
    """Create the files of a drive in an empty folder, and its description.

    The description is written last and atomically: if it exists, all files exist.

    Raises:
        ValueError: The folder holds a drive of another geometry.
    """
    folder = DiskFolder(path)
    try:
        there, whole = read_description(path)
        _check_geometry(there.geometry, spec.geometry, path)
    except ValueError:
        empty = folder.sizes().get(DESCRIPTION) == 0  # its creation was interrupted
        if os.path.lexists(path / DESCRIPTION) and not empty:
            raise
        there, whole = None, False
        NandFiles.make(folder, spec.geometry)
    if there != spec or not whole:
        folder.put(DESCRIPTION, encode_description(spec))
    folder.close()


def encode_description(spec: DriveSpec) -> bytes:
    """Encode a description as JSON with a CRC-32."""
    values = asdict(spec)
    return json.dumps(values | {"format": FORMAT, "crc32": _crc(values)}, indent=1).encode()


def _crc(values: Any) -> int:
    return crc32(json.dumps(values, sort_keys=True).encode())


def _decode_description(values: Any) -> Any:
    """Return the drive fields of a description; raises ValueError if the checksum does not match."""
    if values.get("format") != FORMAT:
        raise ValueError(f"format {values.get('format')}: this version knows {FORMAT}: use the one that made it")
    drive = {name: value for name, value in values.items() if name not in ("format", "crc32")}
    if _crc(drive) != values["crc32"]:
        raise ValueError("does not match its checksum")
    return drive


def repair_description(text: bytes) -> bytes | None:
    """Repair a description with one flipped bit; None if that is not possible."""
    if len(text) > MAX_DESCRIPTION_BYTES:
        return None
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            DriveSpec.from_dict(_decode_description(json.loads(flipped)))
            return bytes(flipped)
        except _WRONG:
            continue
    return None


def secret_of(path: Path | None) -> bytes:
    """Return the key of a drive's handles: kept in its folder, or random for a drive in memory.

    Raises ValueError if it is damaged: with another key, hosts could not find their sequences.
    """
    if path is None:
        return os.urandom(_SECRET_BYTES)
    return repair_secret(DiskFolder(path))


def read_secret(folder: Folder) -> tuple[bytes, bool]:
    """Read the key in a folder.

    Returns:
        The key (empty if there is none), and whether it is intact (False if one bit was corrected).

    Raises:
        ValueError: It is damaged.
    """
    try:
        content = folder.read(SECRET)
    except FileNotFoundError:
        return b"", False
    secret = content[:_SECRET_BYTES]
    corrected = correct_single_bit(secret, int.from_bytes(content[_SECRET_BYTES:], "little"))
    if corrected is None or len(content) != _SECRET_BYTES + 4:
        raise ValueError(f"{folder.name}/{SECRET} is damaged: replace it with vcsd drive fsck {folder.name}")
    return corrected[0], corrected == (secret, crc32(secret))


def repair_secret(folder: Folder) -> bytes:
    """Return the key in a folder; a damaged bit is repaired, a missing key is generated."""
    secret, whole = read_secret(folder)
    secret = secret or os.urandom(_SECRET_BYTES)
    if not whole:
        folder.put(SECRET, secret + crc32(secret).to_bytes(4, "little"))
    return secret


def _check_geometry(stored: Geometry, requested: Geometry, path: Path) -> None:
    for name, value in asdict(requested).items():
        if value != getattr(stored, name):
            raise ValueError(
                f"{path}: holds a drive with {name} = {getattr(stored, name)}, but {name} = {value} is requested: "
                f"use the original description, or another folder"
            )
