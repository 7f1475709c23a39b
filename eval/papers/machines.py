"""Machines of the papers as overlays of the one cost model.

`machine.yaml` in a paper's folder names its model, its GPU and the values that its authors measured or that we assume.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from csd_spec.checked import frozen_value
from kv_cache.cost import BASE, CostModel, Overlay
from nvmevirt_config.document import read_yaml
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.papers.paper import FACTORS, Constant
from vcsd_eval.papers.profiles import Gpu, Model

FOLDER = Path(__file__).parent
ALONE = {  # name of an entry: the field of Overlay that it sets, and the conversion
    "mfu": ("mfu", lambda number: number),
    "start_ms": ("start_s", lambda number: number * 1e-3),
    "sequence_layer_us": ("sequence_layer_s", lambda number: number * 1e-6),
    "step_s": ("step_s", lambda number: number),
    "token_s": ("token_s", lambda number: number),
    "prefill_tokens_per_s": ("prefill_token_s", lambda number: 1 / number),
    "prefill_pair_s": ("prefill_pair_s", lambda number: number),
}
OF_PEAK = "prefill_tflops"  # reached in prefill; becomes a share of the peak of the GPU's data sheet


@frozen_value
class OverlayEntry:
    """A number of an overlay: why it may be so, and the claim that fixes it; without one it is assumed."""

    value: float
    unit: str = Field(min_length=1)
    why: str = Field(min_length=1)
    fixed_by: str = ""


@frozen_value
class PaperMachine:
    """A paper's model and GPU, and overlays by name."""

    model: str
    gpu: str
    overlays: dict[str, dict[str, OverlayEntry]]

    def __post_init__(self) -> None:
        for name, entries in self.overlays.items():
            if unknown := set(entries) - {*ALONE, OF_PEAK}:
                raise ValueError(f"overlays.{name}: {min(unknown)}: must be one of {', '.join((*ALONE, OF_PEAK))}")

    def overlay(self, name: str) -> Overlay:
        """An overlay in the units of the cost model."""
        entries = self.overlays[name]
        fields = {ALONE[key][0]: ALONE[key][1](entry.value) for key, entry in entries.items() if key in ALONE}
        if OF_PEAK in entries:
            fields["mfu"] = entries[OF_PEAK].value / Gpu.load(self.gpu).fp16_tflops
        return Overlay(**fields)


@cache
def machine_of(paper: str) -> PaperMachine:
    """The machine of a paper; raises ValueError naming file and entry."""
    read = read_yaml(FOLDER / paper.replace("-", "_") / "machine.yaml", PaperMachine)
    overlays = {
        name: {
            key: replace(entry, value=entry.value * FACTORS.get(f"{name}.{key}", 1)) for key, entry in entries.items()
        }
        for name, entries in read.overlays.items()
    }
    return replace(read, overlays=overlays)


def overlay(paper: str, name: str = "") -> Overlay:
    """An overlay of a paper; without a name the one that is called as the paper."""
    return machine_of(paper).overlay(name or paper)


def constant(paper: str, entry: str, name: str = "", shown: str = "") -> Constant:
    """An entry of an overlay as a constant of the paper's model. name: of the overlay. shown: of the constant."""
    source = machine_of(paper).overlays[name or paper][entry]
    return Constant(
        shown or entry,
        source.value,
        source.unit,
        source.why,
        source.fixed_by,
        f"{name or paper}.{entry}",
    )


def papers() -> list[str]:
    """Papers that have a machine."""
    return sorted(path.parent.name for path in FOLDER.glob("*/machine.yaml"))


def experiment(
    model: Annotated[str, typer.Option(help="model profile: a name or a YAML file")] = "llama-3-8b",
    gpu: Annotated[
        str, typer.Option(help="GPU profile: a name, a name with a count (8xh100), or a YAML file")
    ] = "h100",
    tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="tokens per prompt")] = 16384,
    batch: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="sequences in a decode step, each of this number of tokens")
    ] = 1,
) -> Outcome:
    """Seconds of prefill and of a decode step by the one cost model, and with each paper's overlay on it."""
    decoder, accelerator = Model.load(model), Gpu.some(gpu).accelerator
    rows, overlays = [("base", _times(CostModel.of(decoder, accelerator), tokens, batch))], dict[str, Any]()
    for paper in papers():
        for name, entries in machine_of(paper).overlays.items():
            times = _times(CostModel.of(decoder, accelerator, overlay(paper, name)), tokens, batch)
            fields = [{"field": key, **_entry(entry)} for key, entry in entries.items()]
            overlays[name] = {"paper": paper, **times, "fields": fields}
            rows.append((name, times))
    result = {"model": model, "gpu": gpu, "tokens": tokens, "batch": batch, "mfu": BASE.mfu, **rows[0][1]}
    shown = [(name, f"{each['prefill_s']:.3f}", f"{1e3 * each['decode_s']:.3f}") for name, each in rows]
    title = f"{decoder.name} on {gpu}: prefill of {tokens:,} tokens, a decode step of {batch} x {tokens:,} (modelled)"
    why = [
        (name, each["field"], f"{each['value']:g}", each["fixed_by"] or "assumed", each["why"])
        for name, kind in overlays.items()
        for each in kind["fields"]
    ]
    return Outcome(
        {**result, "overlays": overlays},
        [
            table(title, ("overlay", "prefill, s", "decode step, ms"), shown),
            table("Overlays", ("overlay", "field", "value", "fixed by", "why"), why, left=("field", "fixed by", "why")),
        ],
    )


def _times(cost: CostModel, tokens: int, batch: int) -> dict[str, float]:
    return {"prefill_s": cost.prefill_s(tokens), "decode_s": cost.decode_s(batch, batch * tokens)}


def _entry(entry: OverlayEntry) -> dict[str, Any]:
    return {"value": entry.value, "unit": entry.unit, "why": entry.why, "fixed_by": entry.fixed_by}
