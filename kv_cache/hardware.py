"""Tiers that hold the KV cache, and routes between them.

A route is a chain of links that the pieces of a copy pass one after the other. Routes that share bandwidth name the
same link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

DEVICE = "device"
"""Name of the tier of the model's device, where attention runs."""

HOST = "host"
"""Name of the tier of host memory."""

PAGE_CACHE = "page-cache"
"""Name of the tier of buffered files, which the kernel caches."""

DIRECT = "direct"
"""Name of the tier of files and devices with direct I/O."""

CSD = "csd"
"""Name of the tier of drives that attend."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory or device that holds KV blocks.

    Attributes:
        limit_bytes: Capacity; None: unlimited.
        cache_bytes: For a tier of buffered files: size of the kernel's page cache (LRU); None: unlimited.
        dirty_bytes: Maximum number of dirty bytes in that page cache.
        attends: Whether attention runs in this tier.
    """

    name: str
    limit_bytes: int | None = None
    cache_bytes: int | None = None
    dirty_bytes: int | None = None
    attends: bool = False

    def __post_init__(self) -> None:
        for name in ("limit_bytes", "cache_bytes", "dirty_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{self.name}: {name} = {value}: must be at least 0")

    def with_limit(self, nbytes: int) -> Tier:
        """Copy with another limit, bytes; for buffered files with a bounded page cache, the size of that cache."""
        if self.cache_bytes is not None:
            return replace(self, cache_bytes=nbytes)
        return replace(self, limit_bytes=nbytes)


@dataclass(frozen=True, slots=True)
class SharedLink:
    """A shared transfer resource: a bus, a copy thread, or one direction of an SSD.

    Attributes:
        bytes_per_s: Bandwidth, shared evenly by the active transfers of the highest priority.
        start_ns: Latency before the bytes of each piece, ns; with `fifo` the link is occupied meanwhile.
        overhead_ns: Time that the whole link is occupied for each piece in addition to its bytes, ns.
        fifo: Serve one piece at a time, the highest priority first, instead of sharing the bandwidth.
        contention: Bandwidth fraction, in (0, 1], that remains while another link is busy, by the name of that link.
            If several apply, the smallest.
    """

    name: str
    bytes_per_s: float
    start_ns: int = 0
    overhead_ns: float = 0.0
    fifo: bool = False
    contention: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.start_ns < 0 or self.overhead_ns < 0:
            raise ValueError(
                f"{self.name}: bytes_per_s = {self.bytes_per_s}, start_ns = {self.start_ns}, overhead_ns = "
                f"{self.overhead_ns}: the rate must be above 0, the times at least 0"
            )
        if off := [name for name, share in self.contention.items() if not 0 < share <= 1]:
            raise ValueError(f"{self.name}: contention by {off[0]}: a share must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Route:
    """Path of bytes from one tier to another.

    Attributes:
        links: Names of links, in the order in which a piece passes them.
        piece_bytes: Size of the pieces of a copy, which are pipelined through the links; 0: a copy is one piece.
        block_bytes: Granularity of a copy, bytes: whole blocks are moved.
        miss_links: Links of a piece that is not in the page cache.
        background: Links that a piece passes after it counts as done.
    """

    name: str
    links: tuple[str, ...]
    piece_bytes: int = 0
    block_bytes: int = 1
    miss_links: tuple[str, ...] = ()
    background: tuple[str, ...] = ()

    def blocks(self, first: int, end: int) -> tuple[int, int]:
        """The byte range [first, end) in whole blocks."""
        block = self.block_bytes
        return first // block * block, -(-end // block) * block


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU: memory size and bandwidth, peak FP16 operations/s without sparsity."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float


# NVIDIA's data sheet of the SXM module: 80 GB of HBM3, 3.35 TB/s, 989 TFLOPS
H100 = Accelerator("h100", 80 * 2**30, 3350e9, 989e12)


@dataclass(frozen=True, slots=True)
class Machine:
    """Tiers, links, and a route for each pair of tiers between which bytes can move."""

    tiers: Mapping[str, Tier]
    links: Mapping[str, SharedLink]
    routes: Mapping[tuple[str, str], Route]

    @classmethod
    def of(cls, tiers: list[Tier], links: list[SharedLink], routes: dict[tuple[str, str], Route]) -> Machine:
        """Build a machine; raises ValueError if a route or link refers to an unknown name."""
        machine = cls({tier.name: tier for tier in tiers}, {link.name: link for link in links}, dict(routes))
        for (source, target), route in routes.items():
            for name in (source, target):
                if name not in machine.tiers:
                    raise ValueError(f"route {route.name}: unknown tier {name!r}; tiers: {', '.join(machine.tiers)}")
            for name in (*route.links, *route.miss_links, *route.background):
                if name not in machine.links:
                    raise ValueError(f"route {route.name}: unknown link {name!r}; links: {', '.join(machine.links)}")
        for link in links:
            if lacking := set(link.contention) - set(machine.links):
                raise ValueError(f"link {link.name}: contention by unknown link {min(lacking)!r}")
        return machine

    @property
    def below_device(self) -> str:
        """Tier for blocks that leave the device: host memory, or buffered files if only these have memory."""
        host, files = self.tiers.get(HOST), self.tiers.get(PAGE_CACHE)
        return PAGE_CACHE if host and host.limit_bytes == 0 and files and files.cache_bytes else HOST

    def with_limits(self, limits: Mapping[str, int]) -> Machine:
        """Copy with other limits of some tiers.

        Args:
            limits: Bytes by tier; names of other tiers are ignored.
        """
        tiers = {name: tier.with_limit(limits[name]) if name in limits else tier for name, tier in self.tiers.items()}
        return replace(self, tiers=tiers)
