"""KV data of a system on its drives, and a decode step of one drive, simulated for a sample of sequences and layers."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache

from csd_spec import DriveSpec, ModelShape
from csd_spec.layouts import layout_named, resolve
from csd_spec.presets import PCIE3_X4_P2P
from ftl import maps_of
from host_driver.sharding import assign_heads
from vcsd_eval.papers.instinfer.simulate import SimulatedDrive
from vcsd_eval.papers.instinfer.systems import InStorageSystem, Setup

SAMPLED_PAGES = 1_000_000  # stored by the sequences that are simulated, at most; the others take the same time
MOST_PAGES = 160_000_000  # the same if all layers are simulated, so that a worker has memory for them
WITHOUT_SHARE = ("dense", "progressive")  # methods whose pages follow from their budget alone


@dataclass(frozen=True, slots=True)
class Steps:
    """The mean decode step of the slowest drive: of the whole batch and all layers.

    Attributes:
        units_s: Seconds by unit.
        pages: Pages that the drive reads.
        program_s: Seconds of writing the prompt.
        realtime_factor: Device seconds over wall seconds of the simulation.
        sequences: Sequences that were simulated.
    """

    units_s: dict[str, float]
    pages: float
    program_s: float
    realtime_factor: float
    sequences: int


@dataclass(frozen=True, slots=True)
class Fill:
    """KV data of a system on its drives."""

    setup: Setup
    system: InStorageSystem
    batch: int
    drives: int

    @property
    def share(self) -> ModelShape:
        """Layers and heads of the slowest drive, the one with the most heads."""
        shape = self.setup.model.shape
        kv_heads, q_heads = max((len(shard.kv_heads), len(shard.q_heads)) for shard in assign_heads(shape, self.drives))
        return replace(shape, kv_heads=kv_heads, q_heads=q_heads)

    @property
    def layout(self) -> str:
        """Name of the layout of the KV data."""
        return resolve(self.system.layout, None, bf16=False, latent=self.setup.model.latent).name

    @property
    def fits(self) -> bool:
        """Whether the drive has pages for the last token of every sequence."""
        return self.batch * self.share.layers * self._layer_pages <= self.setup.drive.geometry.pages

    @property
    def sequences(self) -> int:
        """Sequences that are simulated."""
        most = MOST_PAGES if self.setup.sampled_layers is None else SAMPLED_PAGES
        return min(self.batch, max(1, most // (self._layer_pages * self.setup.simulated_layers)))

    @property
    def _layer_pages(self) -> int:
        """Pages that a layer of a sequence takes on the slowest drive."""
        setup, layout, shape = self.setup, layout_named(self.layout), self.share
        tokens = setup.input + setup.output
        form = layout.form(setup.drive.geometry.page_bytes, shape.head_dim, tokens)
        maps = maps_of(form, 1, shape.kv_heads).values()
        return sum(mapped.streams * (tokens // mapped.per_group) for mapped in maps if mapped.programmed)

    def steps(self) -> Steps:
        """Simulate the decode steps; raises OutOfSpaceError."""
        setup, system, drive = self.setup, self.system, self.setup.drive
        shape = replace(self.share, layers=setup.simulated_layers)
        scale = self.batch * self.share.layers / (self.sequences * shape.layers)
        page_share = setup.constants.token_page_share if system.page_share is None else system.page_share
        alone = replace(
            system,
            name="",
            batched=False,
            page_share=1.0 if system.method in WITHOUT_SHARE else page_share,
            compression=system.compression or setup.compression,
        )
        cache = round(drive.cache_bytes / scale)
        dram = max(
            cache + drive.geometry.page_bytes, round(drive.dram_bytes / scale)
        )  # rows wait in it for their group
        spec = replace(
            drive, link=PCIE3_X4_P2P, cache_bytes=cache, dram_bytes=dram
        )  # the link changes nothing in a drive
        lengths = (setup.input, *setup.points, setup.input + setup.output)
        steps = _simulated(spec, shape, self.sequences, lengths, self.layout, alone)
        return replace(
            steps,
            units_s={unit: scale * seconds for unit, seconds in steps.units_s.items()},
            pages=scale * steps.pages,
            program_s=scale * steps.program_s,
        )


@lru_cache(maxsize=1024)
def _simulated(
    spec: DriveSpec, shape: ModelShape, sequences: int, lengths: tuple[int, ...], layout: str, system: InStorageSystem
) -> Steps:
    """The mean step of these sequences and layers alone. lengths: the prompt, those of the steps, and the last one."""
    assert system.page_share is not None and system.compression is not None
    prompt, *decoded, context = lengths
    with closing(SimulatedDrive(spec, shape, sequences, context, layout)) as drive:
        program_s, units, began = drive.grow(prompt), Counter[str](), time.perf_counter()
        pages = 0
        for length in decoded:
            drive.grow(length)
            params, before = system.budget(system.compression, length, shape.head_dim), drive.ftl.counters.read
            units.update(drive.step(system.method, params, system.page_share, system.schedule))
            pages += drive.ftl.counters.read - before
        factor = sum(units.values()) / (time.perf_counter() - began)
    mean_s = {unit: seconds / len(decoded) for unit, seconds in units.items()}
    return Steps(mean_s, pages / len(decoded), program_s, factor, sequences)
