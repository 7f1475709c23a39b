"""Modelled cost of redundancy by drives, batch size, tokens and network, and whether parity over drives ever wins.

The forms are those of `vcsd.redundancy_cost`. Prefill and decode step of `recompute` are the GPU's roofline with the KV
data in GPU memory. A host needs longer, so `recompute` is modelled at its best, and parity gains nothing by that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from csd_spec.network import NETWORKS, network_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.sharding import assign_heads
from nvmevirt_config import load_drive
from vcsd.redundancy_cost import (
    FIGURES,
    PARITY_DRIVES,
    Decode,
    Figure,
    Rates,
    Scheme,
    cheapest,
    costs,
    flash_factor,
    is_useful,
)
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import numbers
from vcsd_eval.papers.instinfer.options import BatchSizes, DriveCounts, Rows, setup_of
from vcsd_eval.papers.instinfer.systems import Setup
from vcsd_eval.papers.options import MachineOptions, Simulated

SIZES = ("drives", "batch", "tokens", "network")
SHOWN: tuple[tuple[Scheme, Figure, str, float], ...] = (
    ("mirror", "storage_bytes", "mirror GB", 1e9),
    ("mirror", "full_s", "full s", 1),
    ("parity", "storage_bytes", "parity GB", 1e9),
    ("parity", "degraded_s", "serves s", 1),
    ("parity", "full_s", "full s", 1),
    ("recompute", "degraded_s", "recomp. serves s", 1),
    ("recompute", "full_s", "full s", 1),
)
NOT_BUILT = (
    "It is not built: drives refuse the XOR of FP16 rows, which can be infinity or NaN, so parity would be opaque rows "
    "or values by key, and no drive attends across it. All figures are modelled, none is measured."
)


@dataclass(frozen=True, slots=True)
class Combinations:
    """Settings to compare, each with each."""

    drive: Annotated[
        Path | None, typer.Option("--drive-config", help="YAML description of the drives (default: the paper's)")
    ] = None
    drives: DriveCounts = "4,8,20"
    batch_sizes: BatchSizes = "16,256"
    tokens: Annotated[str, typer.Option(help="comma-separated numbers of stored tokens per sequence")] = "2048,32768"
    decoded: Annotated[int, typer.Option(min=2, max=1 << 20, help="tokens of these that were decoded")] = 1024
    networks: Annotated[str, typer.Option(help=f"with commas: none, {', '.join(NETWORKS)}")] = "none,25gbe"
    parity_drives: Annotated[
        int, typer.Option(min=2, max=1024, help="drives of a parity group without the parity drive")
    ] = PARITY_DRIVES

    def rows(self, setup: Setup) -> Rows:
        """A row for each combination."""
        counts, batches, lengths = (numbers(name, getattr(self, name)) for name in ("drives", "batch_sizes", "tokens"))
        if min(counts) < 2:
            raise ValueError(f"drives = {self.drives!r}: each must be at least 2, one drive has no redundancy")
        names = self.networks.split(",")
        networks = {name: None if name == "none" else network_named(name, "networks") for name in names}
        shape, combined = setup.model.shape, []
        for drives, batch, tokens, (name, network) in product(counts, batches, lengths, networks.items()):
            assign_heads(shape, drives)
            decode = Decode.of(shape, drives, batch, tokens, self.decoded)
            combined.append(row(replace(setup, network=network), decode, self.parity_drives) | {"network": name})
        return combined


def row(setup: Setup, decode: Decode, parity_drives: int = PARITY_DRIVES) -> dict[str, Any]:
    """Costs of all schemes, and the schemes with the least of each figure."""
    setup = replace(setup, input=decode.tokens - decode.decoded, output=decode.decoded)
    host_s = setup.prefill_gpu_s(decode.batch), setup.gpu_s(decode.batch) + setup.attention_s(decode.batch)
    shape = setup.model.shape
    factor = flash_factor(setup.drive, "latent" if shape.latent else "fp16", shape, decode.tokens)
    by_redundancy = costs(decode, Rates.of(setup.drive, decode.drives, setup.network, factor, host_s), parity_drives)
    return {
        "drives": decode.drives,
        "batch": decode.batch,
        "tokens": decode.tokens,
        "alternatives": {scheme: asdict(cost) for scheme, cost in by_redundancy.items()},
        "least": {figure: cheapest(by_redundancy, figure) for figure in FIGURES},
        "parity_is_useful": is_useful(by_redundancy, "parity"),
    }


def verdict(rows: Rows) -> dict[str, Any]:
    """Number of rows in which parity has the least of a figure, and in which it is useful; a sentence about both."""
    least = {figure: sum("parity" in row["least"][figure] for row in rows) for figure in FIGURES}
    useful = sum(row["parity_is_useful"] for row in rows)
    said = (
        f"Of {len(rows)} combinations, parity needs the least storage in {least['storage_bytes']} and the fewest bytes "
        f"per step in {least['step_bytes']}; it serves first in {least['degraded_s']} and has full redundancy first in "
        f"{least['full_s']}. In {useful} it needs the least storage of all schemes that serve again within some time. "
        f"{NOT_BUILT}"
    )
    return {"least": least, "useful": useful, "rows": len(rows), "sentence": said}


def experiment(machine: MachineOptions, combinations: Combinations) -> Outcome:
    """Modelled cost of redundancy over drives: storage, bytes per step, time to service and to full redundancy."""
    spec = load_drive(combinations.drive) if combinations.drive else INSTCSD_ZYNQ7045_8CH
    setup = setup_of(machine, Simulated(), drive=spec)
    rows = combinations.rows(setup)
    parity = verdict(rows)
    result = {"modelled": True, "model": setup.model.name, "gpu": setup.gpu.name, "rows": rows, "parity": parity}
    columns = (*SIZES, *(words for *_, words, _ in SHOWN), "first")
    title = (
        f"Redundancy, {setup.model.name} on {setup.gpu.name}, modelled. A mirror serves at once. "
        "(): does not fit. First by storage, bytes a step, service, full redundancy: Mirror, Parity, Recompute"
    )
    return Outcome(result, [table(title, columns, map(_cells, rows), left=("network", "first"))], [parity["sentence"]])


def _cells(row: dict[str, Any]) -> list[str]:
    """A row for people."""
    figures = []
    for scheme, figure, _, unit in SHOWN:
        cost = row["alternatives"][scheme]
        value = cost[figure] / unit
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        figures.append(text if cost["fits"] else f"({text})")
    first = " ".join("".join(name[0].upper() for name in row["least"][figure]) or "-" for figure in FIGURES)
    return [*(str(row[name]) for name in SIZES), *figures, first]
