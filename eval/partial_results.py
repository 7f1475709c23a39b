"""Results of parts that are done, kept in a file while a run lasts, so that a killed one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SOURCES = (
    "csd_spec",
    "csd_io",
    "csd_link",
    "ftl",
    "attention_engine",
    "kv_cache",
    "csd_firmware",
    "host_driver",
    "nvmevirt_config",
    "vcsd",
    "vcsd_eval",
)


class ResultCache:
    """Values by key, a line of JSON each; path None keeps them in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._done = path, dict[str, Any]()
        if path and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    key, value = json.loads(line)
                except ValueError:
                    break  # the line during which the run was killed
                self._done[key] = value
            path.write_text("".join(json.dumps(item) + "\n" for item in self._done.items()), encoding="utf-8")

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __getitem__(self, key: str) -> Any:
        return self._done[key]

    def values(self) -> Iterable[Any]:
        """All values, in the order in which they were made."""
        return self._done.values()

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The kept value of a key, or a new one made by `make`."""
        if key not in self._done:
            self.put(key, make())
        return self._done[key]

    def put(self, key: str, value: Any) -> None:
        """Keep a value of JSON types."""
        self._done[key] = value
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps((key, value)) + "\n")

    def close(self) -> None:
        """The run is over: nothing is left to go on with."""
        if self.path:
            self.path.unlink(missing_ok=True)


def fingerprint(parts: Iterable[object], files: Iterable[Path]) -> str:
    """Changes with parts, with sizes and times of files, and with any of our sources."""
    digest = hashlib.sha256(repr(list(parts)).encode())
    for path in files:
        stat = path.stat()
        digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    root = Path(__file__).parents[1]
    for package in SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
