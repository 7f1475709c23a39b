"""Energy and money of a token: operations of each unit, by constants that have a source and a range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from csd_spec import DriveSpec
from csd_spec.checked import frozen_value
from nvmevirt_config.document import read_yaml
from vcsd_eval.lifetime.drive import DriveCounts
from vcsd_eval.papers.profiles import Model

Bound = Literal["low", "value", "high"]
BOUNDS: tuple[Bound, ...] = ("low", "value", "high")
Positive = Annotated[float, Field(gt=0)]
PROGRESSIVE = "progressive"
MILLION = 1e6
GPU_BYTES_PER_S, GPU_FLOPS = 3.35e12, 989e12  # H100 SXM data sheet


@frozen_value
class EnergyConstant:
    """A number with its range. low and high are those of the energy, or of the years, that it leads to."""

    unit: str
    low: Positive
    value: Positive
    high: Positive
    source: str

    def at(self, bound: Bound) -> float:
        """The number at one end of its range, or in the middle."""
        constant: float = getattr(self, bound)
        return constant


@frozen_value
class EnergyConstants:
    """All constants by name."""

    constants: dict[str, EnergyConstant]

    def at(self, bound: Bound) -> dict[str, float]:
        """The numbers by name."""
        return {name: constant.at(bound) for name, constant in self.constants.items()}


@cache
def constants() -> EnergyConstants:
    """The shipped ones."""
    return read_yaml(Path(__file__).parent / "constants.yaml", EnergyConstants)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices that the user sets."""

    drive_dollars: Annotated[float, typer.Option(min=0, max=1e6, help="price of a drive, dollars")] = 300.0
    dram_dollars_per_gb: Annotated[float, typer.Option(min=0, max=1e4, help="price of host memory")] = 5.0
    gpu_dollars_per_hour: Annotated[float, typer.Option(min=0, max=1e4, help="price of a GPU-hour at full use")] = 2.5
    dollars_per_kwh: Annotated[float, typer.Option(min=0, max=100, help="price of energy")] = 0.1
    service_years: Annotated[float, typer.Option(min=0.1, max=100, help="years after which hardware is replaced")] = 5.0


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """Requests of a replay, and the flash operations of all drives for them."""

    kind: str
    layout: str
    counts: DriveCounts
    model: Model
    spec: DriveSpec
    drives: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token."""
        return self.model.shape.kv_bytes_per_token


def units(work: ReplayWork, at: Mapping[str, float]) -> dict[str, float]:
    """Joules by unit, of all requests that were counted.

    Flash holds prompts in every kind but host memory, and answers too where decoding reads from it. New prompt tokens
    attend to the prefix on the GPU, which reads it once. An output token attends to the whole context: in GPU memory
    for an engine, across the link for a plain SSD and for host memory, in the drives for ours.
    """
    tally, page = work.counts.tally, work.spec.geometry.page_bytes
    context_bytes, prefix_bytes = tally.context_tokens * work.kv_bytes, tally.reused_tokens * work.kv_bytes
    new_bytes = (tally.input_tokens - tally.reused_tokens) * work.kv_bytes
    decoded = decoded_bytes(work, at)
    flash = work.kind != "host memory"
    programs = flash * work.drives * work.counts.programmed_pages
    senses = flash * work.drives * (tally.read_pages + work.counts.moved_pages) + decoded / page
    crossing = {"plain SSD": context_bytes, "host memory": context_bytes}.get(work.kind, 0.0)
    link_bytes = prefix_bytes + new_bytes + crossing
    if work.kind == "in drives":
        link_bytes += tally.output_tokens * _query_bytes(work)
    staged = {"in drives": 0, "host memory": 1}.get(work.kind, 2)  # peer to peer, kept there, and copied
    attended = 0.0 if work.kind == "in drives" else context_bytes + crossing  # what crosses is written there first
    timing, joule = work.spec.timing, 1e-12
    gpu_bytes, gpu_flops = _gpu(work, attended, at["decode_batch"])
    return {
        "page sense": senses * timing.read_ns * 1e-9 * at["sense_w"],
        "page program": programs * timing.program_ns * 1e-9 * at["program_w"],
        "erase": flash * work.drives * work.counts.erases * timing.erase_ns * 1e-9 * at["erase_w"],
        "channel": (senses + programs) * page * at["channel_pj"] * joule,
        "DRAM": staged * link_bytes * at["dram_pj"] * joule,
        "engine": (work.kind == "in drives") * _macs(work) * at["mac_pj"] * joule,
        "link": link_bytes * at["link_pj"] * joule,
        "GPU": (gpu_bytes * at["gpu_byte_pj"] + gpu_flops * at["gpu_flop_pj"]) * joule,
    }


def decoded_bytes(work: ReplayWork, at: Mapping[str, float]) -> float:
    """Bytes of flash pages that output tokens attend to."""
    share = at["selected"] if work.layout.startswith(PROGRESSIVE) else 1.0
    of_kind = {"in drives": share, "plain SSD": 1.0}.get(work.kind, 0.0)
    return of_kind * work.counts.tally.context_tokens * work.kv_bytes


def _query_bytes(work: ReplayWork) -> float:
    """Queries and outputs of an output token, and its keys and values, FP16."""
    shape = work.model.shape
    return 2 * shape.layers * shape.q_heads * shape.head_dim * 2 + work.kv_bytes


def _macs(work: ReplayWork) -> float:
    """Products of output tokens with all keys and values of their context: more than a selection takes."""
    shape = work.model.shape
    return 2 * shape.layers * shape.q_heads * shape.head_dim * work.counts.tally.context_tokens


def _gpu(work: ReplayWork, attended_bytes: float, batch: float) -> tuple[float, float]:
    """Bytes of GPU memory, and operations."""
    tally, shape = work.counts.tally, work.model.shape
    new = tally.input_tokens - tally.reused_tokens
    per_token = 4 * shape.layers * shape.q_heads * shape.head_dim
    flops = 2 * work.model.active * (new + tally.output_tokens) + per_token * tally.squared_tokens
    if work.kind != "in drives":
        flops += per_token * tally.context_tokens
    return attended_bytes + work.model.read_bytes(batch) / batch * tally.output_tokens, flops


def joules(work: ReplayWork) -> dict[str, dict[str, float]]:
    """Joules a million output tokens by bound: each unit, and `total`."""
    per = MILLION / max(1, work.counts.tally.output_tokens)
    by_bound = {
        bound: {name: unit * per for name, unit in units(work, constants().at(bound)).items()} for bound in BOUNDS
    }
    return {bound: by_unit | {"total": sum(by_unit.values())} for bound, by_unit in by_bound.items()}


def dollars(work: ReplayWork, prices: Prices, years: float, tokens_per_year: float, capacity_bytes: float) -> float:
    """Dollars a million output tokens: hardware by its years, energy, and time of the GPU at its roofline.

    Args:
        work: A replay.
        prices: Prices that the user sets.
        years: That a drive lives at this traffic.
        tokens_per_year: Output tokens of all the traffic.
        capacity_bytes: What host memory holds in place of drives.
    """
    at = constants().at("value")
    energy = joules(work)["value"]["total"] / 3.6e6 * prices.dollars_per_kwh
    attended = 0.0 if work.kind == "in drives" else work.counts.tally.context_tokens * work.kv_bytes
    nbytes, flops = _gpu(work, attended, at["decode_batch"])
    gpu_s = (nbytes / GPU_BYTES_PER_S + flops / GPU_FLOPS) * MILLION / max(1, work.counts.tally.output_tokens)
    if work.kind == "host memory":
        hardware, lives = capacity_bytes / 1e9 * prices.dram_dollars_per_gb, prices.service_years
    else:
        hardware, lives = work.drives * prices.drive_dollars, min(years, prices.service_years)
    return energy + gpu_s / 3600 * prices.gpu_dollars_per_hour + hardware / lives / tokens_per_year * MILLION
