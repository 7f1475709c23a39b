"""First token after a stored prefix: loading it over attending to it in the drives that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from csd_spec import DriveSpec
from csd_spec.presets import INSTCSD_OVERLAPPED
from vcsd_eval.fair.headline import Headline, Ranged, Varied, varied_drive
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti.constants import FEW_TOKENS
from vcsd_eval.papers.tutti.evaluate import DRIVES, TUTTI
from vcsd_eval.papers.tutti.in_drives import Drives
from vcsd_eval.papers.tutti.reading import GpuReading, Path

COMMAND = "vcsd eval fair --only tutti"
PREFIX, NEWS = 128 * 1024, (1, 4, 16, 64, 256)
VARIED = ("engine.lanes", "timing.channel_bytes_per_s", "link.bytes_per_s")


@dataclass(frozen=True, slots=True)
class TuttiCase:
    """Drives, the path over which Tutti loads, and new tokens."""

    spec: DriveSpec = INSTCSD_OVERLAPPED
    load_bytes_per_s: float = TUTTI.bytes_per_s
    new: int = 1


def _reading() -> GpuReading:
    return GpuReading.on(Model.load("llama-3-8b"), Gpu.load("h100"), overlay("tutti", FEW_TOKENS))


def ratios(case: TuttiCase) -> Mapping[str, float]:
    """Loading over attending in drives, by condition."""
    reading = _reading()
    drives = Drives(case.spec, DRIVES, reading.model.shape)
    ours = drives.first_token_s(reading, case.new, PREFIX)
    loaded = reading.first_token_s(case.new, PREFIX, Path(case.load_bytes_per_s, layered=True))
    return {
        "as_published": loaded / ours,
        "same_hardware_plain_ssd": reading.first_token_s(case.new, PREFIX, drives.path()) / ours,
    }


def headline() -> Headline:
    """The headline of Tutti: one new token after 128K stored ones."""
    case = TuttiCase()
    load = case.load_bytes_per_s
    varied = [
        Varied("load_bytes_per_s", load, "bytes/s", lambda factor: TuttiCase(load_bytes_per_s=factor * load)),
        *varied_drive(case.spec, TuttiCase, VARIED),
    ]
    ranged = Ranged.of(case, varied, ratios)
    losses = [
        {"setting": f"new tokens, {name}", "value": new, "other": "loading", "ratio": ratio}
        for new in NEWS
        for name, ratio in ratios(TuttiCase(new=new)).items()
        if ratio < 1
    ]
    published = ranged.figure("as_published", COMMAND)
    return Headline(
        what=f"seconds to the first token, loading a prefix of {PREFIX:,} tokens over attending in {DRIVES} drives",
        figures={
            "as_published": published,
            "same_schedule": published,
            "same_error": published,
            "same_hardware_plain_ssd": ranged.figure("same_hardware_plain_ssd", COMMAND),
            "same_service": published,
        },
        tornado=[*ranged.tornado("as_published")],
        loses_at=losses,
        notes=[
            f"one new token; Tutti loads at {TUTTI.bytes_per_s / 1e9:g} GB/s, layer by layer, and so do drives in "
            "same_hardware_plain_ssd, over their own links; both are exact, and one request is served alone",
        ],
    )
