"""Points of the map: decode throughput of each system, and the rates at which they tie, in closed form and modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csd_spec.layouts import layout_named
from ftl import maps_of
from vcsd_eval.fair.plain_ssd import plain_rate, plain_ssds
from vcsd_eval.papers.instinfer.fill import Fill
from vcsd_eval.papers.instinfer.runs import run
from vcsd_eval.papers.instinfer.systems import BATCHED_DENSE, OURS, InStorageSystem, Setup, paged, room_of
from vcsd_eval.papers.profiles import Gpu

GB = 1e9
METHODS: Mapping[str, InStorageSystem] = {"ours": OURS, "dense": BATCHED_DENSE}
CSD, PLAIN = "csd", "plain_ssd"
LINKS = (1.0, 2.0, 4.0, 7.0, 10.0, 14.0, 20.0, 28.0)  # GB/s of a plain SSD
RATES = (0.4, 0.8, 1.2, 1.6, 2.4, 3.6)  # GB/s of a flash channel: ONFI 3 to 5
BATCHES, CONTEXTS = (1, 4, 16, 64, 256, 1024), (2048, 8192, 32768, 131072, 524288)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the map: a setup, whose input is the context, a method, a batch, and how many drives.

    plain_rate: bytes/s of each plain SSD; None: of one with the drive's flash and link.
    """

    setup: Setup
    system: InStorageSystem
    batch: int
    drives: int
    plain_rate: float | None = None

    @property
    def fill(self) -> Fill:
        """The KV data of the point on its drives."""
        return Fill(self.setup, self.system, self.batch, self.drives)

    def with_drive(self, part: str, **changes: Any) -> Point:
        """The point with other values in a part of the drive: `geometry`, `timing` or `engine`."""
        drive = self.setup.drive
        changed = replace(drive, **{part: replace(getattr(drive, part), **changes)})
        return replace(self, setup=replace(self.setup, drive=changed))

    def with_channels(self, gb_s: float) -> Point:
        """The point with flash channels of this rate, GB/s."""
        return self.with_drive("timing", channel_bytes_per_s=round(gb_s * GB))

    def with_context(self, tokens: int) -> Point:
        """The point with `tokens` stored tokens."""
        return replace(self, setup=replace(self.setup, input=tokens))


def _in_drives(point: Point) -> float | None:
    """Tokens/s if drives attend; None if they do not hold the KV data."""
    if not point.fill.fits:
        return None
    return point.batch / run(point.fill).step.total_s


def _plain(point: Point) -> float | None:
    """Tokens/s if the GPU selects and attends to pages of plain SSDs; None if they do not hold the KV data."""
    if not point.fill.fits:
        return None
    rate = point.plain_rate or plain_rate(point.setup, point.drives)
    return point.batch / plain_ssds(point.setup, point.system, point.batch, point.drives, rate).step.total_s


def _from_host(point: Point) -> float | None:
    """Tokens/s if host memory holds the KV data and the GPU selects; None if it does not fit."""
    setup = point.setup
    if setup.kv_bytes(point.batch, setup.input + setup.output) > setup.host.dram_gib * 2**30:
        return None
    pages = point.fill.steps().pages * point.drives
    seconds = pages * setup.drive.geometry.page_bytes / (setup.host.gpu_link_gb_per_s * GB)
    return point.batch / max(seconds, setup.gpu_s(point.batch))


def _on_gpu(point: Point) -> float | None:
    """Tokens/s of a GPU that serves the sequences that fit, then the others; None if no sequence fits."""
    result = paged(point.setup, point.batch, point.drives)
    return None if result.reason else point.batch / result.step.total_s


def _recomputed(point: Point) -> float:
    """Tokens/s if keys and values are computed again in every step."""
    setup = point.setup
    return point.batch / (setup.gpu_s(point.batch) + setup.cost.prefill_s(setup.input, batch=point.batch))


SYSTEMS: Mapping[str, Callable[[Point], float | None]] = {
    CSD: _in_drives,
    PLAIN: _plain,
    "host": _from_host,
    "gpu": _on_gpu,
    "recompute": _recomputed,
}


def rates(point: Point) -> Row:
    """Tokens/s of each system in decode, and the fastest one."""
    by_system = {name: rate(point) for name, rate in SYSTEMS.items()}
    best = max(by_system, key=lambda name: by_system[name] or 0.0)
    csd, plain = by_system[CSD], by_system[PLAIN]
    return {**by_system, "best": best, "csd_over_plain_ssd": csd / plain if csd and plain else None}


def drive_rate(point: Point) -> float:
    """Bytes/s of pages that one drive reads and attends to, in closed form: min(channels x rate, w E / G).

    E: multiply-accumulates/s of the engine, G: query heads of a KV head. w: bytes of a page that a lane takes in a
    cycle, 2 of FP16 and of codes of few bits, 1 of codes of 8 bits: their mean over the pages that the method reads.
    """
    drive, group = point.setup.drive, point.setup.model.shape.group
    return min(drive.flash_bytes_per_s, 2 / (1 + _share_in_8_bits(point)) * drive.engine.macs_per_s / group)


def _share_in_8_bits(point: Point) -> float:
    """Share of pages with codes of 8 bits among those that the method reads."""
    setup, system = point.setup, point.system
    if system.layout == "fp16":
        return 0.0
    share = point.fill.share
    form = layout_named(system.layout).form(setup.drive.geometry.page_bytes, share.head_dim, setup.input)
    maps = maps_of(form, 1, share.kv_heads)
    coarse = sum(maps[name].streams * (setup.input // maps[name].per_group) for name in ("scores", "values"))
    pages = point.fill.steps().pages
    return max(0.0, 1 - coarse * share.layers * point.batch / pages)


def _page_bytes(point: Point) -> float:
    """Bytes of the pages that a step reads in all drives."""
    pages = point.fill.steps().pages
    return pages * point.setup.drive.geometry.page_bytes * point.drives


def _drives_s(point: Point) -> float:
    """Seconds of a step in drives: pages, in each layer the first page of each dependent read, and commands."""
    reads = 1 if point.system.method == "dense" else 2
    first_s = point.setup.model.shape.layers * reads * point.setup.drive.timing.read_ns / 1e9
    return _page_bytes(point) / (point.drives * drive_rate(point)) + first_s + _commands_s(point)


def _commands_s(point: Point) -> float:
    """Seconds of a step's commands to drives or SSDs, which go on side by side: one for each layer and half."""
    return 2 * point.setup.model.shape.layers * 2 * point.setup.drive.link.command_ns / 1e9


def _hidden(point: Point) -> bool:
    """Whether drives attend to one half of the batch in less time than the GPU takes for the other one."""
    return 2 * point.setup.gpu_s(point.batch / 2) > _drives_s(point)


def tie_with_ssds(point: Point) -> float:
    """Bytes/s of each SSD over which pages come as fast as drives attend to them."""
    return _page_bytes(point) / (_drives_s(point) - _commands_s(point)) / point.drives


def _tie_with_gpu(point: Point) -> float | None:
    """Bytes/s of a GPU's memory at which it serves as many tokens/s as the drives.

    Drives: batch / T. GPU: n M / (W + n K). T: seconds of a step in drives, n: sequences that fit, M: the memory's
    rate, W: bytes of the weights, K: of a sequence's KV data. None if no sequence fits, or if drives would wait for
    the GPU, which reads the weights for either half of the batch: both are then in proportion to M.
    """
    setup, fit = point.setup, min(point.batch, room_of(point.setup))
    if not fit:
        return None
    weights = setup.model.read_bytes(fit)
    rate = point.batch / _drives_s(point) * (weights + fit * setup.kv_bytes(1, setup.input)) / fit
    return None if 2 * weights / rate > _drives_s(point) else rate


@dataclass(frozen=True, slots=True)
class Rival:
    """A baseline that drives tie with at some rate.

    Attributes:
        rate: The varied rate.
        least: Smallest possible rate, GB/s; the largest is 1,000.
        at: Point with that rate, bytes/s, and no other limit on the baseline.
        tie: Rate at which both are equally fast, in closed form; None if no rate makes them equal.
        hides: Whether no rate makes them equal if the GPU takes longer than the drives.
    """

    rate: str
    least: float
    at: Callable[[Point, float], Point]
    tie: Callable[[Point], float | None]
    hides: bool = True


def _plain_at(point: Point, rate: float) -> Point:
    return replace(point, plain_rate=rate)


def _host_at(point: Point, rate: float) -> Point:
    host = replace(point.setup.host, gpu_link_gb_per_s=rate / GB, dram_gib=8192.0)
    return replace(point, setup=replace(point.setup, host=host))


def _gpu_at(point: Point, rate: float) -> Point:
    gpu = replace(point.setup.gpu, memory_gb_per_s=rate / GB)
    return replace(point, setup=replace(point.setup, gpu=gpu))


RIVALS: Mapping[str, Rival] = {
    PLAIN: Rival("each SSD", 0.001, _plain_at, tie_with_ssds),
    "host": Rival("link of the GPU", 1, _host_at, lambda point: _page_bytes(point) / _drives_s(point)),
    "gpu": Rival("memory of the GPU", 20, _gpu_at, _tie_with_gpu, hides=False),
}
WITHIN = 3.0  # of the closed form, where a tie is searched for


def boundary(point: Point, rival: str) -> Row:
    """Rate at which drives and a baseline are equally fast, GB/s: in closed form, and by bisection of the model."""
    other = RIVALS[rival]
    row: Row = {"rival": rival, "rate": other.rate, "closed_form_gb_s": None, "model_gb_s": None, "error_percent": None}
    closed = None if other.hides and _hidden(point) else other.tie(point)
    if closed is None or not other.least * WITHIN < closed / GB < 1000 / WITHIN:
        return row
    low, high = closed / WITHIN, closed * WITHIN

    def is_slower(rate: float) -> bool | None:
        theirs, ours = (SYSTEMS[name](other.at(point, rate)) for name in (rival, CSD))
        return None if theirs is None or ours is None else theirs < ours

    if is_slower(high) is None:
        return row
    while high / low > 1.002:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_slower(middle) else (low, middle)
    error = 100 * (closed / high - 1)
    return row | {"closed_form_gb_s": closed / GB, "model_gb_s": high / GB, "error_percent": error}


AXES: Mapping[str, tuple[Sequence[Any], Callable[[Point, Any], Point]]] = {
    "plain_ssd_gb_s": (LINKS, lambda point, value: _plain_at(point, value * GB)),
    "channel_gb_s": (RATES, lambda point, value: point.with_channels(value)),
    "channels": ((2, 4, 8, 16), lambda point, value: point.with_drive("geometry", channels=value)),
    "engine_lanes": ((16, 64, 256, 1024), lambda point, value: point.with_drive("engine", lanes=value)),
    "batch": (BATCHES, lambda point, value: replace(point, batch=value)),
    "context": (CONTEXTS, lambda point, value: point.with_context(value)),
    "gpu": (
        ("rtx4090", "a6000", "a100", "h100", "8xh100"),
        lambda point, value: replace(point, setup=replace(point.setup, gpu=Gpu.some(value))),
    ),
    "budget": (
        (2.0, 3.0, 5.0, 7.0),
        lambda point, value: replace(point, system=replace(point.system, compression=value)),
    ),
    "drives": ((1, 2, 4, 8), lambda point, value: replace(point, drives=value)),
}


def points_along(point: Point) -> Iterator[tuple[Row, Point]]:
    """A point for each value of each axis that the model allows, the others as they are."""
    model = point.setup.model
    for axis, (values, at) in AXES.items():
        for value in values:
            if axis == "budget" and point.system.method == "dense":
                continue
            if axis == "gpu" and model.weight_bytes > Gpu.some(value).memory_gib * 2**30:
                continue
            if axis != "drives" or value <= model.kv_heads:
                yield {"axis": axis, "value": value}, at(point, value)


def points_of_plane(point: Point) -> Iterator[tuple[Row, Point]]:
    """A point for each rate of plain SSDs and of flash channels."""
    for rate in RATES:
        for link in LINKS:
            at = _plain_at(point.with_channels(rate), link * GB)
            yield {"channel_gb_s": rate, "plain_ssd_gb_s": link}, at


def points_of_work(point: Point) -> Iterator[tuple[Row, Point]]:
    """A point for each batch and context."""
    for context in CONTEXTS:
        for batch in BATCHES:
            yield {"context": context, "batch": batch}, replace(point.with_context(context), batch=batch)
