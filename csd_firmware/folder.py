"""A drive's folder: who has it, what drive it holds, and whether all of it is there."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from csd_io.crc import correct_single_bit, crc32
from csd_io.folder import DiskFolder, Durability, Folder
from csd_spec import DriveSpec, Geometry
from ftl.flash.files import NandFiles
from ftl.flash.upgrade import is_old, upgrade

LOCK, DESCRIPTION, SECRET = "lock", "drive.json", "secret.bin"
FORMAT = 2
MAX_DESCRIPTION_BYTES = 8192  # ours have a quarter of that
_WRONG = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what text that is no description raises
_SECRET_BYTES = 32


class Hold:
    """Keeps others from a folder until it is closed, or this process ends however it ends.

    shared: others may read meanwhile. Raises ValueError with the number of the process that has the folder.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        file = path / LOCK
        self._file: IO[str] | None = None
        if shared and not file.exists():
            return  # nobody has ever opened it to write
        lock = os.fdopen(os.open(file, os.O_RDWR | (0 if shared else os.O_CREAT) | os.O_CLOEXEC, 0o600), "r+")
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
        """Let go of it."""
        if self._file:
            self._file.close()


class DriveFolder:
    """A drive's folder in use: held, described as that drive's, with all files of its flash.

    private: it is only read, and has to be there; who wants nobody to write it meanwhile holds it.
    """

    def __init__(self, spec: DriveSpec, path: Path, private: bool = False, durability: Durability = "process") -> None:
        """Raises ValueError where another process has it, where it holds a drive of another geometry, or where
        something is missing."""
        if not private:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hold = None if private else Hold(path)
        self.files = DiskFolder(path, durability, writable=not private)
        try:
            if private:
                described(path)
            else:
                describe(spec, path)
            if is_old(self.files):
                if private:
                    raise ValueError(f"{path}: was made by an earlier version: vcsd fsck {path} brings it up to date")
                upgrade(self.files, spec.geometry)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it."""
        self.files.close()
        if self._hold:
            self._hold.close()


def described(path: Path) -> DriveSpec:
    """The drive that a folder holds; raises ValueError where it holds none."""
    return read_description(path)[0]


def read_description(path: Path) -> tuple[DriveSpec, bool]:
    """The drive that a folder holds, and whether its description is as it has to be, or was before a bit of it was
    corrected."""
    try:
        text = (path / DESCRIPTION).read_bytes()
        try:
            values = json.loads(text)
            return DriveSpec.from_dict(_unsealed(values)), "format" in values
        except _WRONG:
            fixed = mended(text)
            if fixed is None:
                raise
            return DriveSpec.from_dict(_unsealed(json.loads(fixed))), False
    except (OSError, *_WRONG) as error:
        raise ValueError(f"no drive in {path}: {DESCRIPTION}: {error}") from error


def describe(spec: DriveSpec, path: Path) -> None:
    """Make the files of a drive in a folder that holds none, and write down what it holds; raises ValueError for
    another geometry.

    The description comes last, and is put in place whole: where there is one, everything is there.
    """
    folder = DiskFolder(path)
    try:
        there, whole = read_description(path)
        _check_geometry(there.geometry, spec.geometry, path)
    except ValueError:
        if folder.sizes().get(DESCRIPTION):
            raise
        there, whole = None, False
        if not is_old(folder):
            NandFiles.make(folder, spec.geometry)
    if there != spec or not whole:
        folder.put(DESCRIPTION, sealed(spec))
    folder.close()


def sealed(spec: DriveSpec) -> bytes:
    """A drive as the text of its description, with a CRC-32 of what it says."""
    values = asdict(spec)
    return json.dumps(values | {"format": FORMAT, "crc32": _crc(values)}, indent=1).encode()


def _crc(values: Any) -> int:
    return crc32(json.dumps(values, sort_keys=True).encode())


def _unsealed(values: Any) -> Any:
    """What a description says of the drive; raises ValueError where that is not what was written."""
    if "format" not in values:
        return values  # version 1
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}: this version knows {FORMAT}: use the one that made it")
    drive = {name: value for name, value in values.items() if name not in ("format", "crc32")}
    if _crc(drive) != values["crc32"]:
        raise ValueError("does not match its checksum")
    return drive


def mended(text: bytes) -> bytes | None:
    """A description with one flipped bit undone; None where that does not make it whole."""
    if len(text) > MAX_DESCRIPTION_BYTES:
        return None
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            values = json.loads(flipped)
            if "format" in values:
                DriveSpec.from_dict(_unsealed(values))
                return bytes(flipped)
        except _WRONG:
            continue
    return None


def secret_of(path: Path | None) -> bytes:
    """The key of a drive's handles: kept in its folder, for its owner only, or drawn for a drive in memory.

    Raises ValueError for one that is damaged: other handles would be as good as lost sequences.
    """
    if path is None:
        return os.urandom(_SECRET_BYTES)
    return mend_secret(DiskFolder(path))


def read_secret(folder: Folder) -> tuple[bytes, bool]:
    """The key that a folder holds, empty where there is none, and whether it is as it has to be, or was before a bit of
    it was corrected. Raises ValueError for one that is damaged."""
    try:
        kept = folder.read(SECRET)
    except FileNotFoundError:
        return b"", False
    secret = kept[:_SECRET_BYTES]
    if len(kept) == _SECRET_BYTES:
        return secret, False  # of version 1
    found = correct_single_bit(secret, int.from_bytes(kept[_SECRET_BYTES:], "little"))
    if found is None or len(kept) != _SECRET_BYTES + 4:
        raise ValueError(f"{folder.name}/{SECRET} is damaged: vcsd fsck {folder.name} puts another in its place")
    return found[0], found == (secret, crc32(secret))


def mend_secret(folder: Folder) -> bytes:
    """The key that a folder holds, put there whole, or drawn where there is none."""
    secret, whole = read_secret(folder)
    secret = secret or os.urandom(_SECRET_BYTES)
    if not whole:
        folder.put(SECRET, secret + crc32(secret).to_bytes(4, "little"))
    return secret


def _check_geometry(there: Geometry, asked: Geometry, path: Path) -> None:
    for name, value in asdict(asked).items():
        if value != (found := getattr(there, name)):
            raise ValueError(
                f"{path}: holds a drive with {name} = {found}, and {name} = {value} is asked for: "
                f"name the drive that it was made as, or another folder"
            )
