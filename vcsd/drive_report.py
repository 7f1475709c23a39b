"""What drives did for a model: bytes over the link, flash pages, simulated time by unit."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table

from csd_link.replica import ReplicaError
from csd_spec import DriveError, LogPage
from csd_spec.units import STEP_UNITS
from ftl import token_bytes
from host_driver.driver import Driver
from host_driver.hf.shape import FULL, LayerPlacement
from host_driver.traffic import ReadBack
from vcsd.administer import read_log
from vcsd.tables import Printable

_LEFT_OUT = {  # by key of a drive's log page of programs
    "lost_mass": "attention weight whose V was not read",
    "error_estimate": "error that codes are likely to add",
}
CONTEXTS = (4096, 32_768, 131_072)  # sequence lengths for which the KV fraction in drives is reported, tokens


@dataclass(frozen=True, slots=True)
class DriveReport(Printable):
    """What drives did for a model. Figures per decode step are means over the steps; times are simulated, ns."""

    steps: int
    link_bytes_per_step: float
    plain_offload_bytes_per_step: float
    link_bytes: int  # of all commands: prompts, decode steps, forwards that read back
    plain_offload_bytes: int  # the same if the drives were plain SSDs
    read_back: ReadBack  # forwards of several tokens on a filled cache
    pages_read: int
    pages_programmed: int
    useful_read_fraction: float | None  # of the bytes that crossed the flash channels; None if there were none
    prefill_ns: int
    step_ns: float
    steady_step_ns: float | None  # mean of steps that did not wait for programs or the engine; None: no such step
    by_context: list[dict[str, float | None]]  # step times by length of the longest sequence
    breakdown_ns: dict[str, float]
    shares: list[dict[str, Any]]  # heads and busy time of each drive
    placed: LayerPlacement
    layout: str
    token_bytes: dict[str, float]  # flash bytes per token and layer, all heads: keys, values and copies
    copies: int  # drives that store each row: all of them if query heads share a latent row
    attended: dict[str, float]  # weight that the method left out, see `csd_firmware.logs.AttentionLoss`
    losses: list[dict[str, Any]]  # lost and replaced drives, in order, see `csd_link.replica.Event`

    @classmethod
    def of(
        cls, driver: Driver, placed: LayerPlacement | None = None, attended: dict[str, float] | None = None
    ) -> DriveReport:
        """Build a report from a driver's statistics.

        Args:
            driver: The driver; its drives are asked for `attended` unless that is given.
            placed: Placement of the model's layers; default: all in drives.
            attended: Result of `method_statistics`, if the drives are closed.
        """
        traffic, total, steps = driver.traffic, driver.traffic.total, max(1, driver.traffic.step_count)
        flash = total.flash
        units = Counter(dict.fromkeys(STEP_UNITS, 0))
        units.update(total.breakdown_ns)
        layout, page_bytes = driver.attention.kv_layout, driver.devices[0].spec.geometry.page_bytes
        form = layout.form(page_bytes, driver.shape.head_dim, driver.max_tokens)
        return cls(
            steps=traffic.step_count,
            link_bytes_per_step=total.link_bytes / steps,
            plain_offload_bytes_per_step=total.plain_offload_bytes / steps,
            link_bytes=traffic.link_bytes,
            plain_offload_bytes=traffic.plain_offload_bytes,
            read_back=replace(traffic.read_back),
            pages_read=traffic.flash.pages_read,
            pages_programmed=traffic.flash.pages_programmed,
            useful_read_fraction=flash.useful_bytes / flash.fetched_bytes if flash.fetched_bytes else None,
            prefill_ns=traffic.prefill_ns,
            step_ns=total.ns / steps,
            steady_step_ns=_mean(*(sum(sums[k] for sums in traffic.by_context.values()) for k in (3, 2))),
            by_context=[
                {
                    "from_tokens": first,
                    "steps": count,
                    "step_ns": ns / count,
                    "steady_steps": steady,
                    "steady_step_ns": _mean(steady_ns, steady),
                }
                for first, (count, ns, steady, steady_ns) in sorted(traffic.by_context.items())
            ],
            breakdown_ns={unit: ns / steps for unit, ns in units.items()},
            shares=[
                {
                    "id": number,
                    "kv_heads": list(share.kv_heads),
                    "q_heads": list(share.q_heads),
                    "simulated_busy_ns": busy,
                }
                for number, (share, busy) in enumerate(zip(driver.shares, traffic.busy_ns, strict=True))
            ],
            placed=placed or LayerPlacement(driver.shape, (FULL,) * driver.shape.layers, ()),
            layout=layout.name,
            token_bytes=token_bytes(form, driver.shape.kv_heads),
            copies=len(driver.devices) if driver.shape.latent else 1,
            attended=method_statistics(driver) if attended is None else attended,
            losses=[asdict(event) for device in driver.devices for event in getattr(device, "events", ())],
        )

    def kv_share(self, tokens: int) -> float:
        """Fraction of the KV bytes of a sequence of `tokens` tokens that is in drives."""
        return self.placed.share(tokens)

    def to_dict(self) -> dict[str, Any]:
        """The report in the format of `vcsd run -o json`."""
        return {
            "link_bytes": {
                "per_step": self.link_bytes_per_step,
                "ssd_offload_baseline_per_step": self.plain_offload_bytes_per_step,
                "total": self.link_bytes,
                "ssd_offload_baseline_total": self.plain_offload_bytes,
                "saved": self.saved,
                "read_back": asdict(self.read_back),
            },
            "flash": {
                "pages_read": self.pages_read,
                "pages_programmed": self.pages_programmed,
                "useful_read_fraction": self.useful_read_fraction,
            },
            "kv_layout": {
                "layout": self.layout,
                "bytes_per_token_per_layer": self.token_bytes,
                "drive_copies": self.copies,
            },
            "left_out": self.attended,
            "drives": self.shares,
            "losses": self.losses,
            "layers": self._layers(),
            "simulated_time": {
                "step_ns": self.step_ns,
                "steady_step_ns": self.steady_step_ns,
                "by_context": self.by_context,
                "prefill_ns": self.prefill_ns,
                "steps": self.steps,
                "breakdown_ns": self.breakdown_ns,
            },
        }

    @property
    def saved(self) -> float:
        """Bytes that would cross the links of plain SSDs, over those that crossed: prompts and read-backs included."""
        return self.plain_offload_bytes / max(1, self.link_bytes)

    def tables(self, timed: bool = True) -> Group:
        """The tables; `timed`: with the mean time of a decode step."""
        parts = [self._traffic_table(), *([self._time_table()] if timed else []), self._drive_table()]
        if self.placed.is_mixed:
            parts.append(self._layer_table())
        if self.losses:
            parts.append(self._loss_table())
        return Group(*parts)

    def _traffic_table(self) -> Table:
        table = Table(title=f"Traffic ({self.steps} decode steps)", title_justify="left")
        table.add_column("what")
        table.add_column("figure", justify="right")
        table.add_row("link, a step", _bytes(self.link_bytes_per_step))
        table.add_row("link, a step, KV offloaded to a plain SSD", _bytes(self.plain_offload_bytes_per_step))
        if back := self.read_back.forwards:
            table.add_row(f"read back and attended on the host, {back} forwards", _bytes(self.read_back.link_bytes))
            table.add_row("new tokens of these forwards", f"{self.read_back.tokens:,}")
        table.add_row("link, whole run", _bytes(self.link_bytes))
        table.add_row("link, whole run, KV offloaded to a plain SSD", _bytes(self.plain_offload_bytes))
        table.add_row("link traffic saved, whole run", f"{self.saved:.1f}x")
        stored = ", ".join(f"{name} {nbytes:,.0f}" for name, nbytes in self.token_bytes.items())
        table.add_row(f"flash bytes of a token and layer ({self.layout})", stored)
        if self.copies > 1:
            table.add_row("drives that store all of it", str(self.copies))
        table.add_row("flash pages read", f"{self.pages_read:,}")
        table.add_row("flash pages programmed", f"{self.pages_programmed:,}")
        for key, text in _LEFT_OUT.items():
            if self.attended.get(f"{key}_worst"):
                mean, worst = self.attended[key], self.attended[f"{key}_worst"]
                table.add_row(text, f"{mean:.2%}, worst row {worst:.1%}")
        share = "nothing read" if self.useful_read_fraction is None else f"{self.useful_read_fraction:.1%}"
        table.add_row("useful share of the bytes fetched from flash", share)
        return table

    def _time_table(self) -> Table:
        table = Table(title="Modelled time of a decode step, mean", title_justify="left")
        table.add_column("unit")
        table.add_column("us", justify="right")
        table.add_column("share", justify="right")
        for unit, ns in self.breakdown_ns.items():
            table.add_row(unit, f"{ns / 1e3:.1f}", f"{ns / max(1, self.step_ns):.1%}")
        table.add_section()
        table.add_row("step", f"{self.step_ns / 1e3:.1f}", "")
        return table

    def _layers(self) -> dict[str, Any]:
        """Layers by location, and the KV fraction in drives by sequence length."""
        return {
            "in_drives": list(self.placed.in_drives),
            "with_model": {
                kind: [number for number, layer_kind in enumerate(self.placed.kinds) if layer_kind == kind]
                for kind in sorted(set(self.placed.kinds) - {FULL})
            },
            "kv_fraction_in_drives": {str(tokens): self.kv_share(tokens) for tokens in CONTEXTS},
        }

    def _layer_table(self) -> Table:
        table = Table(title="Layers", title_justify="left")
        table.add_column("where")
        table.add_column("layers")
        layers = self._layers()
        for where, numbers in ({"in drives": layers["in_drives"]} | layers["with_model"]).items():
            table.add_row(where, ", ".join(map(str, numbers)))
        shares = ", ".join(f"{self.kv_share(tokens):.1%} at {tokens:,} tokens" for tokens in CONTEXTS)
        table.add_row("KV data in drives", shares)
        return table

    def _loss_table(self) -> Table:
        table = Table(title="Lost and replaced drives", title_justify="left")
        for column in ("drive", "event", "reason"):
            table.add_column(column)
        for loss in self.losses:
            table.add_row(loss["drive"], loss["kind"], loss["reason"])
        return table

    def _drive_table(self) -> Table:
        table = Table(title="Drives", title_justify="left")
        table.add_column("id", justify="right")
        table.add_column("KV heads")
        table.add_column("query heads")
        table.add_column("simulated busy, ms", justify="right")
        for drive in self.shares:
            heads = [", ".join(map(str, drive[kind])) for kind in ("kv_heads", "q_heads")]
            table.add_row(str(drive["id"]), *heads, f"{drive['simulated_busy_ns'] / 1e6:.2f}")
        return table


def method_statistics(driver: Driver) -> dict[str, float]:
    """Statistics of the driver's method from all drives that answer: means over rows, and the worst row."""
    method, programs = driver.attention.method, []
    for device in driver.devices:
        with suppress(DriveError, ReplicaError, OSError):
            programs.append(read_log(device, LogPage.PROGRAMS)["programs"])
    matching = [program for page in programs for program in page if program["name"] == method]
    rows = sum(program["rows"] for program in matching)
    statistics: dict[str, float] = {"rows": rows}
    for key in _LEFT_OUT if rows else ():
        statistics[key] = sum(program["rows"] * program[key] for program in matching) / rows
        statistics[f"{key}_worst"] = max(program[f"{key}_worst"] for program in matching)
    return statistics


def _mean(total: float, count: int) -> float | None:
    """Mean; None if the count is 0."""
    return total / count if count else None


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.1f} {unit}"
