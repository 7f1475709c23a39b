"""New tokens that attend to a stored prefix inside the drives that hold it, which is then never loaded.

Modelled only: N queries of each head share one read of the prefix. Heads are spread over drives, each drive attends to
its own as their pages come (schedule `overlapped`), and outputs come back with what merging needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attention_engine.clock import EngineClock
from csd_spec import DriveSpec, ModelShape
from vcsd_eval.papers.tutti.reading import GpuReading, Path

VALUE_BYTES, STATE_BYTES = 2, 8  # FP16; a row's largest logit and weight
SHARES = 64  # parts of a prefix, each attended in drives or loaded
LONGEST = 1 << 20  # tokens of a prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer, by part."""

    flash_s: float
    engine_s: float
    link_s: float

    @property
    def total_s(self) -> float:
        """Pages are attended to as they come; queries come before and outputs after them."""
        return max(self.flash_s, self.engine_s) + self.link_s

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        parts = {"flash": self.flash_s, "engine": self.engine_s, "link": self.link_s}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Drives:
    """Drives of one kind, over which a layer's KV heads are spread."""

    spec: DriveSpec
    count: int
    shape: ModelShape

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.shape.kv_heads:
            raise ValueError(f"drives = {self.count}: must be 1 to {self.shape.kv_heads}, the model's KV heads")

    @property
    def heads(self) -> int:
        """KV heads of the drive that has the most."""
        return -(-self.shape.kv_heads // self.count)

    def layer(self, new: int, prefix: int) -> LayerTimes:
        """New tokens that attend to a prefix: pages once, arithmetic for each query."""
        d, group = self.shape.head_dim, self.shape.q_heads // self.shape.kv_heads
        page, engine = self.spec.geometry.page_bytes, EngineClock(self.spec.engine)
        pages = 2 * self.heads * -(-prefix // (page // (VALUE_BYTES * d)))
        rows = new * group * self.heads
        beats = 2 * rows * prefix * -(-d // self.spec.engine.lanes)
        kernels = self.spec.engine.kernels
        busy_ns = max(engine.kernel_ns(-(-beats // kernels)), engine.softmax_ns(-(-rows * prefix // kernels)))
        moved_ns = self.spec.link.command_ns + self.spec.link.transfer_ns(rows * (2 * VALUE_BYTES * d + STATE_BYTES))
        return LayerTimes(
            flash_s=pages * page / self.spec.flash_bytes_per_s, engine_s=busy_ns * 1e-9, link_s=moved_ns * 1e-9
        )

    def path(self) -> Path:
        """Path for loading from the same drives: their links, limited by their flash."""
        return Path(self.count * min(self.spec.link.bytes_per_s, self.spec.flash_bytes_per_s), layered=True)

    def first_token_s(self, reading: GpuReading, new: int, prefix: int) -> float:
        """Prefill of new tokens, layer after layer, each with its prefix in drives."""
        return reading.compute_s(new, 0) + self.shape.layers * self.layer(new, prefix).total_s

    def split_s(self, reading: GpuReading, new: int, prefix: int, path: Path) -> tuple[float, float]:
        """The best share of the prefix to attend to in drives, while the rest is loaded; the first token's time.

        The rest of the next layer comes while one is attended to; GPU and drives attend side by side; every page is
        read once.
        """
        layers, alone = self.shape.layers, reading.compute_s(new, 0)
        flash = layers * self.layer(new, prefix).flash_s

        def at(part: int) -> float:
            attended = prefix * part // SHARES
            on_gpu, load = reading.compute_s(new, prefix - attended) - alone, reading.load_s(prefix - attended, path)
            chain = alone + max(on_gpu, layers * self._beside(new, attended))
            return max(chain + load / layers, load + chain / layers, flash)

        best = 0
        while best < SHARES and at(best + 1) < at(best):  # the greatest of lines: convex
            best += 1
        return best / SHARES, at(best)

    def _beside(self, new: int, prefix: int) -> float:
        return self.layer(new, prefix).total_s if prefix else 0.0

    def engine_needed(self, reading: GpuReading, new: int, prefix: int, path: Path) -> float | None:
        """Multiply-accumulates per second of one drive at which attending takes as long as loading by a path.

        None if no engine suffices, since flash and links alone take longer.
        """
        spare = (reading.first_token_s(new, prefix, path) - reading.compute_s(new, 0)) / self.shape.layers
        layer = self.layer(new, prefix)
        if layer.flash_s + layer.link_s > spare:
            return None
        rows = new * self.heads * self.shape.q_heads // self.shape.kv_heads
        return 2 * rows * prefix * self.shape.head_dim / (spare - layer.link_s)


def crossover(drives: Drives, reading: GpuReading, new: int, path: Path, step: int = 1024) -> int | None:
    """Smallest prefix, in steps of `step` tokens, from which attending in drives is faster than loading by a path."""
    for prefix in range(step, LONGEST + 1, step):
        if drives.first_token_s(reading, new, prefix) < reading.first_token_s(new, prefix, path):
            return prefix
    return None


def table_rows(
    drives: Drives, reading: GpuReading, path: Path, news: Iterable[int], prefixes: Iterable[int]
) -> Iterator[dict[str, float | int | str | None]]:
    """A row for each number of new tokens and each prefix: first tokens by loading and by attending, seconds."""
    prefixes = tuple(prefixes)
    for new in news:
        for prefix in prefixes:
            share, split = drives.split_s(reading, new, prefix, drives.path())
            needed = drives.engine_needed(reading, new, prefix, path)
            yield {
                "drives": drives.count,
                "new": new,
                "prefix": prefix,
                "load_s": reading.first_token_s(new, prefix, path),
                "load_from_drives_s": reading.first_token_s(new, prefix, drives.path()),
                "in_drives_s": drives.first_token_s(reading, new, prefix),
                "bound": drives.layer(new, prefix).bound,
                "split_s": split,
                "split_share": share,
                "engine_needed_gmac_per_s": None if needed is None else needed / 1e9,
            }
