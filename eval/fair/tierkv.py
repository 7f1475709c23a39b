"""Tokens/s of our policy over reactive ones under time slices, at unequal and at equal stays on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vcsd.progress import Tick
from vcsd_eval.fair.headline import Headline, HeadlineFigure
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd
from vcsd_eval.papers.tierkv.tiers import LITERAL, MENDED, REACTIVE, RequestOptions, Row, machine, served

COMMAND = "vcsd eval fair --only tierkv"
ROOMS_GB, SLICE, COUNT, SEED = (4.0, 8.0, 16.0, 32.0, 64.0, 96.0, 128.0), 20, 135, 1
RIVALS = (*REACTIVE, LITERAL)
LONGEST = 1024  # tokens of a slice in which every request ends: requests do not take turns
STEPS = 6  # of the search for a slice
TICKS = len(ROOMS_GB) * (1 + (2 + STEPS) * len(RIVALS))


class PolicyRuns:
    """Requests served by each policy, by host memory."""

    def __init__(self, tick: Tick) -> None:
        self.cost, self.levels = machine(
            Model.load("llama-2-13b"), Gpu.some("h100"), Host.load("tierkv"), Ssd.load("tierkv")
        )
        self.trace, self.tick = RequestOptions(count=COUNT, seed=SEED).requests(self.cost.compute.linear_s()), tick

    def run(self, name: str, room_gb: float, slice_tokens: int) -> Row:
        """A policy's figures."""
        levels = replace(self.levels, host_bytes=int(room_gb * 1e9))
        self.tick(None)
        return served(self.trace, self.cost, levels, name, slice_tokens)

    def best(self, room_gb: float, slice_tokens: int) -> float:
        """Tokens/s of the best of the others."""
        return max(float(self.run(name, room_gb, slice_tokens)["tokens_per_s"]) for name in RIVALS)

    def at_stay(self, name: str, room_gb: float, stay: float) -> float:
        """Tokens/s of a policy with slices so long that requests stay for `stay` tokens in the mean."""
        low, high = SLICE, LONGEST
        rate = 0.0
        for _ in range(STEPS):
            row = self.run(name, room_gb, middle := round((low * high) ** 0.5))
            low, high = (middle, high) if row["stay_tokens"] < stay else (low, middle)
            rate = float(row["tokens_per_s"])
        return rate


def headline(tick: Tick) -> Headline:
    """The headline of TierKV: ours over the best of its policy and reactive ones. low and high: over host memory."""
    runs = PolicyRuns(tick)
    ours = [runs.run(MENDED, room, SLICE) for room in ROOMS_GB]
    stays, rates = ([row[key] for row in ours] for key in ("stay_tokens", "tokens_per_s"))
    published = [rate / runs.best(room, SLICE) for rate, room in zip(rates, ROOMS_GB, strict=True)]
    unrotated = [rate / runs.best(room, LONGEST) for rate, room in zip(rates, ROOMS_GB, strict=True)]
    service = [
        rate / max(runs.at_stay(name, room, stay) for name in RIVALS)
        for rate, room, stay in zip(rates, ROOMS_GB, stays, strict=True)
    ]
    same = HeadlineFigure.over(service, COMMAND)
    return Headline(
        what="tokens/s of mended over the best of TierKV's policy, LRU, LFU and static tiers, Llama-2-13B on an H100",
        figures={
            "as_published": HeadlineFigure.over(published, COMMAND),
            "same_schedule": same,
            "same_error": same,
            "same_hardware_plain_ssd": same,
            "same_service": same,
        },
        loses_at=_losses({"equal stay": service, "no turns": unrotated}),
        notes=[
            f"as_published: slices of {SLICE} tokens; ours keeps a request for {min(stays):.0f} to {max(stays):.0f}",
            "same_service: slices of the others are so long that requests stay as long as in ours; all are exact, on "
            "the same host memory and SSD, so the other conditions change nothing. Value: median over host memory; "
            "low, high: least and most",
        ],
    )


def _losses(by_system: Mapping[str, Sequence[float]]) -> list[dict[str, object]]:
    return [
        {"setting": f"host memory GB, {name}", "value": f"{room:g}", "other": "best of the others", "ratio": ratio}
        for name, ratios in by_system.items()
        for room, ratio in zip(ROOMS_GB, ratios, strict=True)
        if ratio < 1
    ]
