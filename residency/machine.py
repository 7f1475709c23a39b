"""Places that hold KV and paths between them, as values.

A path is a chain of links that a copy passes one after the other, cut into pieces. What two paths share is a link that
both name, so that bandwidth is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

DEVICE, HOST, PAGE_CACHE, DIRECT, CSD = "device", "host", "page-cache", "direct", "csd"


@dataclass(frozen=True, slots=True)
class Place:
    """Something that holds KV.

    limit_bytes: of what may lie there; None: as much as wanted. cache_bytes: of a place that is files behind the page
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


@dataclass(frozen=True, slots=True)
class Link:
    """What moves bytes: a bus, a thread that copies, an SSD in one direction.

    bytes_per_s: shared evenly by the most urgent of what is under way, or given to one piece after another (`in_turn`),
    the most urgent first. start_ns: before each piece's bytes; a piece in turn holds the link meanwhile. hindered: the
    share of its rate that is left while another link is busy; of several the least counts.
    """

    name: str
    bytes_per_s: float
    start_ns: int = 0
    in_turn: bool = False
    hindered: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.start_ns < 0:
            raise ValueError(
                f"{self.name}: {self.bytes_per_s} bytes/s, {self.start_ns} ns: must be above 0, and at least 0"
            )
        if off := [name for name, share in self.hindered.items() if not 0 < share <= 1]:
            raise ValueError(f"{self.name}: hindered by {off[0]}: a share is above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Path:
    """How bytes come from one place to another.

    links: names, in the order in which a piece passes them. piece_bytes: how a copy is cut, so that pieces follow each
    other through the links; 0 is not at all. block_bytes: whole blocks of so many bytes are moved. missed: the links of
    a piece that the page cache does not hold. background: links that a piece passes after it counts as done.
    """

    name: str
    links: tuple[str, ...]
    piece_bytes: int = 0
    block_bytes: int = 1
    missed: tuple[str, ...] = ()
    background: tuple[str, ...] = ()

    def blocks(self, first: int, end: int) -> tuple[int, int]:
        """The byte range [first, end) in whole blocks."""
        block = self.block_bytes
        return first // block * block, -(-end // block) * block


@dataclass(frozen=True, slots=True)
class Machine:
    """Places, links, and a path for each pair of places between which bytes may move."""

    places: Mapping[str, Place]
    links: Mapping[str, Link]
    paths: Mapping[tuple[str, str], Path]

    @classmethod
    def of(cls, places: list[Place], links: list[Link], paths: dict[tuple[str, str], Path]) -> Machine:
        """A machine whose names fit each other; raises ValueError."""
        machine = cls({each.name: each for each in places}, {each.name: each for each in links}, dict(paths))
        for (source, target), path in paths.items():
            for name in (source, target):
                if name not in machine.places:
                    raise ValueError(f"path {path.name}: there is no place {name!r}")
            for name in (*path.links, *path.missed, *path.background):
                if name not in machine.links:
                    raise ValueError(f"path {path.name}: there is no link {name!r}")
        for link in links:
            if lacking := set(link.hindered) - set(machine.links):
                raise ValueError(f"link {link.name}: there is no link {min(lacking)!r}")
        return machine
