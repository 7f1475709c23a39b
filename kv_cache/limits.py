"""Capacity limits of tiers on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as FilePath
from tempfile import gettempdir

from kv_cache.hardware import CSD, DEVICE, DIRECT, HOST, PAGE_CACHE, Machine, Route, SharedLink, Tier

BLOCK_BYTES = 4096  # direct I/O moves whole blocks
_GB = 1e9

# Assumed rates of routes until they are measured, and in simulated time: PCIe 4 x16, one copy thread, a PCIe 4 SSD by
# its data sheet
ASSUMED = (
    SharedLink("up", 25 * _GB),
    SharedLink("down", 25 * _GB),
    SharedLink("copy", 10 * _GB),
    SharedLink("read", 7 * _GB, start_ns=80_000),
    SharedLink("write", 5 * _GB, start_ns=20_000),
)


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Capacity of each tier for the KV cache, bytes.

    Attributes:
        device: On the model's device; None: unlimited.
        host: In host memory; None: unlimited.
        page_cache: Page cache for files; None: free memory of this process's cgroup or of the machine.
        files: Directory for files; or, for direct I/O, a file (such as a mounted drive's namespace), a block device or
            an NVMe character device. None: the directory for temporary files.
        max_tokens: Maximum length of a sequence, tokens; None: the model's context, at most 4096.
        allow_overwrite: Write to a device that is not empty.
    """

    device: int | None = None
    host: int | None = None
    page_cache: int | None = None
    files: FilePath | None = None
    max_tokens: int | None = None
    allow_overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("device", "host", "page_cache", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} = {value!r}: must be a whole number, at least 0")
        if self.max_tokens == 0:
            raise ValueError("max_tokens = 0: must be at least 1")
        if self.files is not None and not isinstance(self.files, FilePath):
            raise ValueError(f"files = {self.files!r}: must be a pathlib.Path")
        if self.files is not None and not self.files.exists():
            raise ValueError(f"files = {self.files}: no such folder, file or device")

    @property
    def folder(self) -> FilePath:
        """Directory of the files."""
        return FilePath(gettempdir()) if self.files is None or self.on_device else self.files

    @property
    def on_device(self) -> bool:
        """Whether direct I/O uses one file or device instead of files in a directory."""
        return self.files is not None and not self.files.is_dir()

    def machine(self, cache_bytes: int, drives: bool = False) -> Machine:
        """Machine with these tiers and their routes; `drives` adds computational drives."""
        tiers = [
            Tier(DEVICE, self.device, attends=True),
            Tier(HOST, self.host),
            Tier(PAGE_CACHE, cache_bytes=cache_bytes),
            Tier(DIRECT),
        ]
        links: dict[tuple[str, str], tuple[str, ...]] = {
            (HOST, DEVICE): ("up",),
            (DEVICE, HOST): ("down",),
            (PAGE_CACHE, DEVICE): ("copy", "up"),
            (DEVICE, PAGE_CACHE): ("down", "copy"),
            (DIRECT, DEVICE): ("read", "up"),
            (DEVICE, DIRECT): ("down", "write"),
            (DIRECT, HOST): ("read",),
            (HOST, DIRECT): ("write",),
        }
        if drives:
            tiers.append(Tier(CSD, attends=True))
            links |= {(CSD, DEVICE): ("read", "up"), (DEVICE, CSD): ("down", "write")}
            links |= {(CSD, HOST): ("read",), (HOST, CSD): ("write",)}
        routes = {ends: _path(*ends, passed) for ends, passed in links.items()}
        return Machine.of(tiers, list(ASSUMED), routes)


def _path(source: str, target: str, links: tuple[str, ...]) -> Route:
    """The route between two tiers, named after both."""
    return Route(
        f"{source}>{target}",
        links,
        block_bytes=BLOCK_BYTES if DIRECT in (source, target) else 1,
        miss_links=("read", *links) if source == PAGE_CACHE else (),
        background=("write",) if target == PAGE_CACHE else (),
    )
