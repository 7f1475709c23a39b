"""Tiers that hold KV and routes between them, as values.

A route is a chain of links that a copy passes one after the other, cut into pieces. Two routes that share bandwidth
name the same link, so that it is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

DEVICE, HOST, PAGE_CACHE, DIRECT, CSD = "device", "host", "page-cache", "direct", "csd"


@dataclass(frozen=True, slots=True)
class Tier:
    """Something that holds KV.

    limit_bytes: of what may lie there; None: as much as wanted. cache_bytes: of a tier that is files behind the page
    cache, how much of it the kernel keeps in memory, least recently used first out; None: all of it. dirty_bytes: of
    that, how much may wait to be written back. attends: whether attention runs there.
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
        """The tier with another limit, bytes: of files behind a bounded page cache, what the kernel keeps in memory."""
        if self.cache_bytes is not None:
            return replace(self, cache_bytes=nbytes)
        return replace(self, limit_bytes=nbytes)


@dataclass(frozen=True, slots=True)
class Link:
    """What moves bytes: a bus, a thread that copies, an SSD in one direction.

    bytes_per_s: shared evenly by the most urgent of what is under way, or given to one piece after another (`fifo`),
    the most urgent first. start_ns: before each piece's bytes; with `fifo` the piece holds the link meanwhile.
    overhead_ns: of the whole link, for each piece beside its bytes.
    contention: the share of its rate that is left while another link is busy; of several the least counts.
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
                f"{self.name}: {self.bytes_per_s} bytes/s, {self.start_ns} and {self.overhead_ns} ns: must be above 0, "
                "and at least 0"
            )
        if off := [name for name, share in self.contention.items() if not 0 < share <= 1]:
            raise ValueError(f"{self.name}: contention by {off[0]}: a share is above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Route:
    """How bytes come from one tier to another.

    links: names, in the order in which a piece passes them. piece_bytes: how a copy is cut, so that pieces follow each
    other through the links; 0 is not at all. block_bytes: whole blocks of so many bytes are moved. miss_links: the
    links of a piece that the page cache does not hold. background: links that a piece passes after it counts as done.
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
    """What computes: its memory, and its peak rates. flops: operations/s in FP16, without sparsity."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float


# By NVIDIA's data sheet of the SXM module: 80 GB of HBM3, 3.35 TB/s, 989 TFLOPS
H100 = Accelerator("h100", 80 * 2**30, 3350e9, 989e12)


@dataclass(frozen=True, slots=True)
class Machine:
    """Tiers, links, and a route for each pair of tiers between which bytes may move."""

    tiers: Mapping[str, Tier]
    links: Mapping[str, Link]
    routes: Mapping[tuple[str, str], Route]

    @classmethod
    def of(cls, tiers: list[Tier], links: list[Link], routes: dict[tuple[str, str], Route]) -> Machine:
        """A machine whose names fit each other; raises ValueError."""
        machine = cls({each.name: each for each in tiers}, {each.name: each for each in links}, dict(routes))
        for (source, target), route in routes.items():
            for name in (source, target):
                if name not in machine.tiers:
                    raise ValueError(f"route {route.name}: there is no tier {name!r}")
            for name in (*route.links, *route.miss_links, *route.background):
                if name not in machine.links:
                    raise ValueError(f"route {route.name}: there is no link {name!r}")
        for link in links:
            if lacking := set(link.contention) - set(machine.links):
                raise ValueError(f"link {link.name}: there is no link {min(lacking)!r}")
        return machine

    def with_limits(self, limits: Mapping[str, int]) -> Machine:
        """The machine with other limits of some tiers.

        Args:
            limits: Bytes by tier. Names that the machine lacks are ignored.
        """
        tiers = {name: tier.with_limit(limits[name]) if name in limits else tier for name, tier in self.tiers.items()}
        return replace(self, tiers=tiers)
