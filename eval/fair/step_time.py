"""Time of a decode step in computational drives, simulated on a sample of sequences and layers, and on plain SSDs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np

from csd_spec import DriveSpec, ModelShape
from csd_spec.presets import PCIE3_X4_P2P
from eval.papers.instinfer import steps
from eval.papers.instinfer.runs import Fill
from eval.papers.instinfer.simulate import SimulatedDrive
from eval.papers.instinfer.systems import Breakdown, InStorage, Result, Setup, finish
from kv_cache import CSD
from kv_cache.transfer.simulated import LayerTime

SEQUENCES, LAYERS = 32, 2  # simulated at most; the others take the same time
ROWS = 1 << 22  # tokens times KV heads that are simulated at most
LENGTHS = 16  # tokens stored at simulated steps: one at random in each part of decode, so that no group size aliases
RANDOM_READS_PER_S = 1e6  # of 4 KiB by a plain SSD, queue depth 128: data sheet of the Samsung 980 PRO, 2 TB
PAGE_READ_BYTES = 4096  # of such a read

WITHOUT_SHARE = ("dense", "progressive")  # methods whose pages follow from their budget alone
NO_UNITS = ("pages", "program")  # entries of `drive_units` beside the units


def drive_units(setup: Setup, system: InStorage, batch: int, drives: int) -> dict[str, float]:
    """Seconds of each unit of the slowest drive in the mean decode step, of the whole batch and all layers.

    Returns:
        Seconds by unit, "pages" that the drive reads, and "program": seconds of writing the prompt.
    """
    fill = Fill(setup, (system,), batch, drives)
    share = replace(fill.share, layers=min(LAYERS, fill.share.layers))
    sequences = min(SEQUENCES, batch, max(1, ROWS // (setup.input * share.kv_heads)))
    page_share = setup.constants.token_page_share if system.page_share is None else system.page_share
    alone = replace(
        system,
        page_share=1.0 if system.method in WITHOUT_SHARE else page_share,
        compression=system.compression or setup.compression,
    )
    spec, lengths = replace(setup.drive, link=PCIE3_X4_P2P), (*sampled(setup), setup.input + setup.output)
    units = dict(_units(spec, share, sequences, lengths, fill.layout, alone))  # the link does not change them
    scale = batch / sequences * setup.model.shape.layers / share.layers
    return {name: value * scale for name, value in units.items()}


def sampled(setup: Setup) -> tuple[int, ...]:
    """The prompt, and tokens stored at LENGTHS steps of decode, ascending."""
    draws = np.random.default_rng(0).random(LENGTHS)
    some = setup.input + ((np.arange(LENGTHS) + draws) * setup.output / LENGTHS).astype(int)
    return setup.input, *sorted({int(each) for each in some})


@lru_cache(maxsize=1024)
def _units(
    spec: DriveSpec, share: ModelShape, sequences: int, lengths: tuple[int, ...], layout: str, system: InStorage
) -> tuple[tuple[str, float], ...]:
    prompt, *decoded, context = lengths
    drive = SimulatedDrive(spec, share, sequences, context, layout)
    units: Counter[str] = Counter()
    program_s = drive.grow(prompt)
    assert system.page_share is not None and system.compression is not None
    for length in decoded:
        drive.grow(length)
        params = system.budget(system.compression, length, share.head_dim)
        units.update(drive.step(system.method, params, system.page_share, system.schedule, range(share.layers)))
    return *((name, value / len(decoded)) for name, value in units.items()), ("program", program_s)


def in_drives(setup: Setup, system: InStorage, batch: int, drives: int) -> Result:
    """A system that attends in drives: its mean decode step, and throughput end to end."""
    units = drive_units(setup, system, batch, drives)
    shipped_s = setup.kv_bytes(batch, setup.input) / drives / setup.drive.link.bytes_per_s
    prefill_s = max(setup.prefill_gpu_s(batch), shipped_s, units["program"])
    step = system.breakdown(setup, batch, drives, {name: s for name, s in units.items() if name not in NO_UNITS})
    return finish(setup, system.name, batch, drives, prefill_s, step, units_s=units)


def plain_ssds(setup: Setup, system: InStorage, batch: int, drives: int, rate: float) -> Result:
    """SSDs without an engine: a GPU selects by the same method, and pages come to it.

    The schedule is that of batched commands: the GPU works for one half of the batch while pages of the other half
    come.

    Args:
        setup: The model on hardware.
        system: Whose method, layout and budget the GPU takes.
        batch: Number of sequences.
        drives: Number of SSDs.
        rate: Bytes/s at which pages of one of them come, such as `plain_rate`.
    """
    pages = drive_units(setup, system, batch, drives)["pages"]
    nbytes = pages * setup.drive.geometry.page_bytes
    halves, layers = 2, setup.model.shape.layers
    commands = halves * layers
    on_gpu_s = setup.gpu_s(batch / halves) * halves + nbytes * drives / (setup.gpu.memory_gb_per_s * 1e9)
    on_gpu_s += commands * setup.constants.sequence_layer_s
    transfer_s = nbytes / rate + commands * 2 * setup.drive.link.command_ns / 1e9
    work = LayerTime(1e9 * on_gpu_s / commands, 1e9 * transfer_s / commands)
    stored = steps.Stored(home=CSD, tokens=setup.input, rows=dict.fromkeys(range(halves), 1))
    total_s = steps.step_s(steps.drives(), steps.in_turns, layers, stored, work)
    hidden_s = max(0.0, on_gpu_s + transfer_s - total_s)
    step = Breakdown(transfer_s, 0, on_gpu_s, hidden_s=hidden_s)
    written_s = setup.kv_bytes(batch, setup.input) / drives / setup.drive.link.bytes_per_s
    name = f"{system.name}, plain SSD"
    return finish(setup, name, batch, drives, max(setup.prefill_gpu_s(batch), written_s), step)


def plain_rate(setup: Setup, drives: int, reads_per_s: float = RANDOM_READS_PER_S) -> float:
    """Bytes/s of one of `drives` plain SSDs with the flash and the link of the setup's drives.

    The least of its link, its flash, its random reads of 4 KiB (`reads_per_s`) and its share of the GPU's link.
    """
    drive = setup.drive
    reads = reads_per_s * min(PAGE_READ_BYTES, drive.geometry.page_bytes)
    return min(drive.link.bytes_per_s, drive.flash_bytes_per_s, reads, setup.host.gpu_link_gb_per_s * 1e9 / drives)
