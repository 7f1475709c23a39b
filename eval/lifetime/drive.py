"""The drive under simulation, its counters between two moments, and the figures that follow from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import numpy as np

from csd_spec import DriveSpec, ModelShape
from csd_spec.arrays import U32
from ftl.facade import Ftl
from ftl.flash.nand import Nand
from vcsd.progress import Tick, no_tick
from vcsd_eval.lifetime.workload import Day, Visit

WARM = 0.25  # fraction of the day in which the drive fills, and nothing is counted
YEAR_DAYS = 365.25


@dataclass(frozen=True, slots=True)
class DriveTraffic:
    """Traffic of one of several drives.

    Attributes:
        spec: The drive, with 1/scale of its blocks and of its DRAM.
        shape: Model whose KV cache is stored.
        drives: Drives that share the traffic.
        day: Requests, 1/scale of the traffic of all drives.
        hours: Length of the day.
        scale: Time runs as many times faster, so that the lanes are as busy as those of the whole drive.
        over_provisioning: Physical over logical capacity, less 1, percent.
    """

    spec: DriveSpec
    shape: ModelShape
    drives: int
    day: Day
    hours: float
    scale: int
    over_provisioning: float

    @property
    def logical_pages(self) -> int:
        """Pages that the host may fill."""
        return int(self.spec.geometry.pages / (1 + self.over_provisioning / 100))

    def ns(self, arrival_s: float) -> int:
        """Simulated time of an arrival."""
        return round(arrival_s * 1e9 / self.scale)


def scaled(spec: DriveSpec, scale: int) -> DriveSpec:
    """The drive with fewer blocks in each plane, and less DRAM; lanes, blocks, pages and times are as they were."""
    blocks = spec.geometry.blocks_per_plane // scale
    if blocks < 1:
        raise ValueError(f"scale = {scale}: must be at most {spec.geometry.blocks_per_plane}, the blocks of a plane")
    geometry = replace(spec.geometry, blocks_per_plane=blocks)
    return replace(spec, geometry=geometry, dram_bytes=max(spec.dram_bytes // scale, 1 << 20))


@dataclass(slots=True)
class RequestTally:
    """Counts of the requests that count.

    Attributes:
        requests, input_tokens, output_tokens, reused_tokens: Totals over the traffic of all drives.
        context_tokens: Sum over output tokens of the tokens that each attends to.
        squared_tokens: Sum over new prompt tokens of the tokens that each attends to.
        read_pages: Pages read for reused prefixes.
        waits_ns: Latency of a page read at each request that reuses something on this drive.
    """

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reused_tokens: int = 0
    context_tokens: float = 0.0
    squared_tokens: float = 0.0
    read_pages: int = 0
    waits_ns: list[int] = field(default_factory=list)

    def add(self, input_tokens: int, output_tokens: int, reused: int) -> None:
        """Count a request."""
        self.requests += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.reused_tokens += reused
        self.context_tokens += output_tokens * (input_tokens + output_tokens / 2)
        self.squared_tokens += (input_tokens**2 - reused**2) / 2


@dataclass(frozen=True, slots=True)
class DriveCounts:
    """Work of a drive since it was warm.

    Attributes:
        tally: The requests.
        host_pages: Pages that the host's data fills.
        moved_pages: Pages that garbage collection and wear leveling read and program.
        programmed_pages: Both, and the journal's.
        erases: Blocks erased.
        block_erases: Least, mean and most of a block since the drive was new.
    """

    tally: RequestTally
    host_pages: int
    moved_pages: int
    programmed_pages: int
    erases: int
    block_erases: tuple[int, float, int]

    @property
    def waf(self) -> float:
        """Pages programmed over pages that the host's data fills."""
        return self.programmed_pages / max(1, self.host_pages)

    def wait_us(self, percent: float) -> float | None:
        """Percentile of the latency of a page read; None without reads."""
        return float(np.percentile(self.tally.waits_ns, percent)) / 1e3 if self.tally.waits_ns else None


class Meter:
    """Counts what a drive does."""

    def __init__(self, ftl: Ftl) -> None:
        self.ftl, self.tally = ftl, RequestTally()
        self._before = (0, 0, 0, 0)

    def start(self) -> None:
        """Count from now on."""
        self.tally, self._before = RequestTally(), self._totals()

    def _totals(self) -> tuple[int, int, int, int]:
        counters = self.ftl.counters
        programmed = counters.data + counters.journal + counters.moved
        return counters.data, counters.moved, programmed, int(self.ftl.nand.erase_count.sum())

    def counts(self) -> DriveCounts:
        """Counts since `start`."""
        erased = self.ftl.nand.erase_count
        spread = int(erased.min()), float(erased.mean()), int(erased.max())
        data, moved, programmed, erases = (now - then for now, then in zip(self._totals(), self._before, strict=True))
        return DriveCounts(self.tally, data, moved, programmed, erases, spread)

    def read(self, ppns: U32, now_ns: int, number: int) -> None:
        """Read pages for a request; the latency of one of them, read first, is noted."""
        store = self.ftl.store
        one = ppns[number % ppns.size : number % ppns.size + 1]
        self.tally.waits_ns.append(self.ftl.read(store.all_of(one), now_ns) - now_ns)
        self.ftl.read(store.all_of(ppns), now_ns)
        self.tally.read_pages += ppns.size


class DayReplay(ABC):
    """Requests of a day on one drive, which stores no content."""

    def __init__(self, load: DriveTraffic) -> None:
        self.load = load
        self.ftl = Ftl(load.spec, Nand(load.spec.geometry, payload=False))
        self.meter = Meter(self.ftl)

    @abstractmethod
    def visit(self, visit: Visit, number: int) -> None:
        """Read what a request reuses, and store the rest. number: of the request in the day."""

    def run(self, tick: Tick = no_tick) -> DriveCounts:
        """Replay the day; counted is what happens from when the drive is warm."""
        warm_s, warm = WARM * self.load.hours * 3600, False
        for number, visit in enumerate(self.load.day.visits):
            if not warm and visit.arrival_s >= warm_s:
                self.meter.start()
                warm = True
            self.visit(visit, number)
            tick(None)
        return self.meter.counts()


def counted_days(load: DriveTraffic) -> float:
    """Days of the trace that count."""
    return (1 - WARM) * load.hours / 24


def years(counts: DriveCounts, load: DriveTraffic, cycles: float) -> float:
    """Years until the mean block has its rated cycles, at the rate of the hours that count."""
    pages_a_day = counts.programmed_pages / counted_days(load)
    return cycles * load.spec.geometry.pages / max(1.0, pages_a_day) / YEAR_DAYS


def dwpd(counts: DriveCounts, load: DriveTraffic) -> float:
    """Host writes a day over the logical capacity."""
    return counts.host_pages / counted_days(load) / load.logical_pages
