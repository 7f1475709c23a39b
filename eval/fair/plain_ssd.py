"""Decode of systems whose drives are plain SSDs: a GPU selects, and pages come to it."""

from __future__ import annotations

from kv_cache import CSD
from kv_cache.transfer.simulated import LayerTime
from vcsd_eval.papers.instinfer import steps
from vcsd_eval.papers.instinfer.fill import Fill
from vcsd_eval.papers.instinfer.systems import Breakdown, InStorageSystem, Result, Setup, finish

RANDOM_READS_PER_S = 1e6  # of 4 KiB by a plain SSD, queue depth 128: data sheet of the Samsung 980 PRO, 2 TB
PAGE_READ_BYTES = 4096  # of such a read


def plain_ssds(setup: Setup, system: InStorageSystem, batch: int, drives: int, rate: float) -> Result:
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
    pages = Fill(setup, system, batch, drives).steps().pages
    nbytes = pages * setup.drive.geometry.page_bytes
    halves, layers = 2, setup.model.shape.layers
    commands = halves * layers
    on_gpu_s = setup.gpu_s(batch / halves) * halves + nbytes * drives / (setup.gpu.memory_gb_per_s * 1e9)
    on_gpu_s += commands * setup.constants.sequence_layer_s
    transfer_s = nbytes / rate + commands * 2 * setup.drive.link.command_ns / 1e9
    work = LayerTime(1e9 * on_gpu_s / commands, 1e9 * transfer_s / commands)
    stored = steps.TierContents(home=CSD, tokens=setup.input, rows=dict.fromkeys(range(halves), 1))
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
