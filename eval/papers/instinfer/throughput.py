"""Figures 4, 12 and 13: tokens a second of the paper's five systems and of our paged method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vcsd.progress import status
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Picture, check_picture, numbers
from vcsd_eval.papers.instinfer.options import (
    BatchSizes,
    EnoughDrives,
    Rows,
    Sparse,
    Work,
    rows_outcome,
    run,
)
from vcsd_eval.papers.instinfer.runs import InStorageCase, Runs, enough
from vcsd_eval.papers.instinfer.systems import IN_DRIVES, InStorageSystem, Setup
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.plot import lines, save_figure

HOSTS = ("DeepSpeed", "FlexGen", "FlexGen-SparQ")
BY_DATA_SHEET = ("GPU", "Host", "vLLM")
COLUMNS = ("system", "batch", "tokens_per_s", "prefill_s", "step_s", "realtime_factor", "reason")


def cases(batches: Sequence[int], drives: int, systems: tuple[InStorageSystem, ...] = IN_DRIVES) -> list[InStorageCase]:
    """What `rows` needs."""
    return [InStorageCase(systems, batch, drives) for batch in batches]


def rows(
    runs: Runs,
    batches: Sequence[int],
    drives: int,
    hosts: Sequence[str] = HOSTS,
    systems: tuple[InStorageSystem, ...] = IN_DRIVES,
) -> Rows:
    """A row for each batch size and system."""
    entries: Rows = []
    for batch in batches:
        host = [runs.host(system, batch, drives) for system in hosts]
        for result in [*host, *(runs.drive(system, batch, drives) for system in systems)]:
            entries.append(
                {
                    "system": result.system,
                    "batch": batch,
                    "drives": drives,
                    "tokens_per_s": None if result.reason else result.tokens_per_s,
                    "prefill_s": result.prefill_s,
                    "step_s": result.step.total_s,
                    "realtime_factor": result.realtime_factor,
                    "simulated_sequences": result.simulated_sequences,
                    "reason": result.reason,
                }
            )
    return entries


def experiment(
    machine: MachineOptions,
    work: Work,
    simulated: Simulated,
    sparse: Sparse,
    drives: EnoughDrives = None,
    batch_sizes: BatchSizes = "4,16,32,64,128,256",
    plot: Picture = None,
) -> Outcome:
    """Tokens per second of the paper's five systems and of our paged method (figures 4, 12, 13).

    Also by data sheet: a GPU that holds the KV cache, one that streams it from host memory, and vLLM.
    """
    check_picture(plot)
    setup, batches = work.setup(machine, simulated, sparse.compression), numbers("batch_sizes", batch_sizes)
    systems: tuple[InStorageSystem, ...] = IN_DRIVES
    if sparse.recorded_model:
        with status("recording attention"):
            from vcsd_eval.papers.instinfer.page_shares import recorded_system

            systems += (recorded_system(setup, sparse.recorded_model),)
    drives = drives or enough(setup, systems, min(batches))
    runs = run(simulated, setup, cases(batches, drives, systems))
    entries = rows(runs, batches, drives, (*HOSTS, *BY_DATA_SHEET), systems)
    if plot:
        save_figure(lines(entries, "batch", "tokens_per_s", "system"), plot)
    model = setup.model
    where = f"{drives} drives with {model.shape.layers} of {model.layers} layers"
    shown = rows_outcome(f"Throughput, {model.name} on {setup.gpu.name}, {where}", entries, COLUMNS, runs)
    shown.result["model"] = kv_of(setup)
    return shown


def kv_of(setup: Setup) -> dict[str, Any]:
    """KV cache of a model per token, by kind of layer, and per sequence of the input length."""
    model, full = setup.model, setup.model.shape
    windows, every = model.window_bytes(setup.input), setup.kv_bytes(1, setup.input)
    return {
        "name": model.name,
        "gpu": setup.gpu.name,
        "layers": {"full": full.layers, "window": model.window_layers},
        "kv_bytes_per_token": {"full": full.kv_bytes_per_token, "window": model.window_bytes(1)},
        "kv_bytes": {"full": every, "window": windows},
        "full_share": every / (every + windows),
    }
