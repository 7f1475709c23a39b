"""`vcsd eval cost-table`: what a host's computational drives cost, as a table for other simulators.

The JSON is described in docs/rack.md. `--vidur` writes the attention profile of Vidur's execution-time predictor
(github.com/microsoft/vidur, `vidur/execution_time_predictor/sklearn_execution_time_predictor.py`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from csd_spec.presets import INSTCSD_OVERLAPPED
from vcsd.tables import flat_table, table
from vcsd_eval.experiment import Outcome
from vcsd_eval.fleet.drive_model import SHIPPED, DriveRates, coefficients
from vcsd_eval.fleet.fleet import NO_NETWORK, checked_gpu, checked_model, port_of
from vcsd_eval.fleet.machine import FleetHost, Scheme

FORMAT = "vcsd-cost-table/1"
LEAST_TOKENS = 256
VIDUR_COLUMNS = (
    "n_embd", "n_q_head", "n_kv_head", "block_size", "num_tensor_parallel_workers", "batch_size", "kv_cache_size",
    "prefill_chunk_size", "is_prefill", "time_stats.attn_prefill.median", "time_stats.attn_decode.median",
    "time_stats.attn_kv_cache_save.median",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CostTableOptions:
    """A host with drives, and the size of the table."""

    model: Annotated[str, typer.Option(help="model profile: a name or a YAML file")] = "llama-3-8b"
    gpu: Annotated[str, typer.Option(help="GPU profile: a name, 8xh100, or a YAML file")] = "h100"
    drives: Annotated[int, typer.Option(min=1, max=1024, help="computational drives of the host")] = 8
    network: Annotated[
        str, typer.Option(help=f"network between host and drives (docs/rack.md), or {NO_NETWORK}: PCIe")
    ] = NO_NETWORK
    token_shards: Annotated[int, typer.Option(min=1, max=128, help="drives that share the tokens of a KV head")] = 1
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="largest batch, sequences")] = 128
    max_tokens: Annotated[int, typer.Option(min=512, max=1 << 20, help="longest context, tokens")] = 1 << 17
    block_size: Annotated[int, typer.Option(min=1, max=4096, help="KV block of Vidur's replica, tokens")] = 16
    coefficients: Annotated[
        Path | None, typer.Option(help="YAML file of the drive's coefficients (default: shipped ones)")
    ] = None
    vidur: Annotated[Path | None, typer.Option(help="attention.csv for Vidur to write")] = None


def machine_of(setting: CostTableOptions) -> FleetHost:
    """The host; raises ValueError for a model without KV heads or a GPU that does not hold it."""
    model = checked_model(setting.model)
    return FleetHost(
        model=model,
        gpu=checked_gpu(setting.gpu, model),
        spec=INSTCSD_OVERLAPPED,
        network=port_of(setting.network),
        fitted=coefficients(setting.coefficients or SHIPPED),
        drives=setting.drives,
        slots=setting.max_batch,
        scheme=Scheme(token_shards=setting.token_shards),
    )


def doubled(first: int, last: int) -> list[int]:
    """Powers of two times `first`, and the last value."""
    numbers = [first << power for power in range((last // first).bit_length()) if first << power < last]
    return [*numbers, last]


def graded(first: int, last: int) -> list[int]:
    """Whole numbers that grow by about a tenth: Vidur's random forests do not interpolate."""
    count = 1 + math.ceil(math.log(last / first) / math.log(1.1))
    return sorted({round(value) for value in np.geomspace(first, last, count)})


def decode_s(machine: FleetHost, batch: int, tokens: int) -> float:
    """Seconds of a layer's attention of a batch in the drives: with commands, link and network.

    Sequences are spread evenly over the groups of the host.
    """
    model, shards = machine.model, machine.shards
    rates = DriveRates.of(machine.spec, model.shape, -(-model.kv_heads * shards // machine.group))
    in_group = -(-batch // machine.groups)
    chain_s = rates.chain_s([tokens] * in_group) / shards
    drive_s = machine.fitted.command_s + machine.fitted.transfer * chain_s
    return drive_s * machine.fitted.slowest(machine.group) + machine.transfer_s(batch)


def rows_of(machine: FleetHost, batches: Iterable[int], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Attention of a decode step by batch and context, each layer."""
    return [
        {"batch": batch, "tokens": token, "layer_s": decode_s(machine, batch, token)}
        for batch in batches
        for token in tokens
    ]


def prefix_s(machine: FleetHost) -> dict[str, float]:
    """Seconds per token of all layers: KV data that a prefill writes to the drives, and that the GPU reads back."""
    return {"write_token_s": float(machine.write_s.max()), "read_token_s": float(machine.read_s.max())}


def vidur_rows(machine: FleetHost, setting: CostTableOptions) -> Iterator[dict[str, Any]]:
    """Rows of Vidur's attention profile, milliseconds per layer.

    Decode rows have the drives' time. Prefill rows have the GPU's attention, or reading the stored prefix if that
    takes longer.
    """
    model, moved, cost = machine.model, prefix_s(machine), machine.cost
    layers = model.shape.layers
    fixed = {
        "n_embd": model.q_heads * model.head_dim, "n_q_head": model.q_heads, "n_kv_head": model.kv_heads,
        "block_size": setting.block_size, "num_tensor_parallel_workers": 1,
    }  # fmt: skip
    write_ms, read_ms = (1e3 * moved[name] / layers for name in ("write_token_s", "read_token_s"))
    for row in rows_of(machine, graded(1, setting.max_batch), graded(LEAST_TOKENS, setting.max_tokens)):
        yield fixed | {
            "batch_size": row["batch"], "kv_cache_size": row["tokens"], "prefill_chunk_size": 0, "is_prefill": False,
            "time_stats.attn_prefill.median": 0.0, "time_stats.attn_decode.median": 1e3 * row["layer_s"],
            "time_stats.attn_kv_cache_save.median": row["batch"] * write_ms,
        }  # fmt: skip
    for stored in (0, *doubled(LEAST_TOKENS, setting.max_tokens // 2)):
        for new in doubled(16, min(4096, setting.max_tokens // 2)):
            attention_ms = 1e3 * cost.prefill_attention_s(stored + new, stored) / layers
            yield fixed | {
                "batch_size": 1, "kv_cache_size": stored, "prefill_chunk_size": new, "is_prefill": True,
                "time_stats.attn_prefill.median": max(attention_ms, stored * read_ms),
                "time_stats.attn_decode.median": 0.0, "time_stats.attn_kv_cache_save.median": new * write_ms,
            }  # fmt: skip


def write_vidur(path: Path, machine: FleetHost, setting: CostTableOptions) -> None:
    """Write the profile; raises ValueError if the file cannot be written."""
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, VIDUR_COLUMNS)
            writer.writeheader()
            writer.writerows(vidur_rows(machine, setting))
    except OSError as error:
        raise ValueError(f"--vidur {path}: {error.strerror}: choose a file in a folder that exists") from error


def experiment(setting: CostTableOptions) -> Outcome:
    """Cost table of a host's computational drives, for other simulators."""
    machine = machine_of(setting)
    fitted = machine.fitted
    rows = rows_of(machine, doubled(1, setting.max_batch), doubled(LEAST_TOKENS, setting.max_tokens))
    if setting.vidur:
        write_vidur(setting.vidur, machine, setting)
    result = {
        "format": FORMAT,
        "model": {"name": machine.model.name, "layers": machine.model.shape.layers}
        | {name: getattr(machine.model, name) for name in ("q_heads", "kv_heads", "head_dim")},
        "drive": machine.spec.name,
        "drives": setting.drives,
        "idle_drives": machine.drives - machine.groups * machine.group,
        "capacity_bytes": machine.groups * machine.group * machine.spec.geometry.capacity_bytes,
        "kv_bytes_per_token": machine.model.shape.kv_bytes_per_token,
        **prefix_s(machine),
        "decode": rows,
        "deviation_percent": fitted.deviation_percent,
        "worst_percent": fitted.worst_percent,
        "made_by": fitted.made_by,
        "setting": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(setting).items()},
    }
    batches = sorted({row["batch"] for row in rows})
    seconds = {(row["batch"], row["tokens"]): row["layer_s"] for row in rows}
    cells = [
        (f"{tokens:,}", *(f"{1e3 * seconds[batch, tokens]:.3g}" for batch in batches))
        for tokens in sorted({row["tokens"] for row in rows})
    ]
    flat = {name: result[name] for name in ("drives", "idle_drives", "capacity_bytes", "write_token_s", "read_token_s")}
    return Outcome(
        result,
        [
            flat_table(f"Tier of {setting.drives} computational drives (modelled)", flat),
            table(
                "Attention of a decode step, ms per layer", ("tokens", *(f"batch {batch}" for batch in batches)), cells
            ),
        ],
        ("attention is dense on FP16 keys and values; sequences of a batch have the same length",),
    )
