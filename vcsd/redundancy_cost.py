"""Modelled cost of redundancy, known before a decode starts: `costs` of each scheme, `Estimate` of a run.

These are closed forms, not measurements. Each drive stores M = B * S * b / n bytes of KV data: B sequences of S tokens,
b bytes per token, KV heads spread evenly over n drives. A byte takes f bytes of flash, including copies of keys. L is
the rate of a drive's link, N that of the host's port in each direction, P the program rate of a drive. Transfers of a
rebuild overlap and have the links to themselves, so seconds are lower bounds; they start when the loss is detected.

- `mirror`: each drive also stores the group of KV heads of another one. Each new row is sent twice. The other drive
  attends at once. The replacement gets both groups of the lost drive: max(2M/L, 2M/N, f*2M/P).
- `parity`: a further drive for each g drives stores the XOR of their rows. The host has all rows of a step, so it sends
  B*b/g bytes and reads none. A drive cannot attend across an XOR: the host reads M from each of g drives first,
  R = max(M/L, g*M/N), and attends itself until the replacement has the rows: max(R, f*M/P). The XOR of FP16 rows can
  be infinity or NaN, so it is stored as opaque bytes, with f = 1. Not built.
- `recompute`: the host repeats the prefill and D decode steps, R = F + D*t, and then attends itself. The replacement
  has the rows max(M/L, M/N, f*M/P) later.

Without a replacement drive, full redundancy is never restored. Slower steps until the rebuild ends are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from csd_spec import DriveSpec, ModelShape
from csd_spec.checked import Count, frozen_value
from csd_spec.layouts import layout_named
from csd_spec.network import Network
from ftl import token_bytes

Scheme = Literal["none", "mirror", "parity", "recompute"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
Figure = Literal["storage_bytes", "step_bytes", "degraded_s", "full_s"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
PARITY_DRIVES = 4  # g: drives of a parity group without the parity drive; at most all drives

_Positive = Annotated[float, Field(gt=0)]
_Seconds = Annotated[float, Field(ge=0)]
_Bytes = Annotated[int, Field(ge=1)]


@frozen_value
class Decode:
    """KV data stored when a drive is lost.

    Attributes:
        drives: Drives that share the KV heads (n).
        batch: Sequences (B).
        tokens: Stored tokens per sequence (S).
        decoded: Tokens of these that were decoded, not prefilled (D).
        token_bytes: KV data of one token (b), bytes.
        copies: Drives that store each row without redundancy: 1, or all of them for latent rows.
    """

    drives: Count
    batch: Count
    tokens: Count
    decoded: Annotated[int, Field(ge=0)]
    token_bytes: Count
    copies: Count = 1

    def __post_init__(self) -> None:
        if self.decoded >= self.tokens:
            raise ValueError(f"decoded = {self.decoded}: must be fewer than tokens = {self.tokens}")

    @classmethod
    def of(cls, shape: ModelShape, drives: int, batch: int, tokens: int, decoded: int) -> Decode:
        """Decode of a model."""
        row = {"token_bytes": shape.kv_bytes_per_token, "copies": drives if shape.latent else 1}
        return cls(drives=drives, batch=batch, tokens=tokens, decoded=decoded, **row)

    @property
    def drive_bytes(self) -> float:
        """KV data of one drive (M), bytes."""
        return self.tokens * self.step_bytes / self.drives

    @property
    def step_bytes(self) -> int:
        """KV data that a decode step adds in all drives, bytes."""
        return self.batch * self.token_bytes * self.copies


@frozen_value
class Rates:
    """Rates and capacity of one drive, and rates of the host.

    Attributes:
        link_bytes_per_s: Rate of a drive's link (L), or of its flash if that is slower.
        port_bytes_per_s: Rate of the host's port, in each direction (N).
        program_bytes_per_s: Program rate of a drive (P).
        flash_factor: Bytes in flash per byte of KV data (f).
        capacity_bytes: Flash of one drive.
        prefill_s: Prefill of the batch on the host (F), s.
        step_s: A decode step on the host (t), s.
    """

    link_bytes_per_s: _Positive
    port_bytes_per_s: _Positive
    program_bytes_per_s: _Positive
    flash_factor: _Positive
    capacity_bytes: _Bytes
    prefill_s: _Seconds
    step_s: _Seconds

    @classmethod
    def of(
        cls, spec: DriveSpec, drives: int, network: Network | None, flash_factor: float, host_s: tuple[float, float]
    ) -> Rates:
        """Rates from a description of the drives.

        Args:
            spec: Description of each drive.
            drives: Number of drives.
            network: Network between host and drives; None: the links of all drives are the host's port.
            flash_factor: Bytes in flash per byte of KV data.
            host_s: Prefill and decode step on the host, s.
        """
        flash, timing = spec.geometry, spec.timing
        channels = flash.channels * timing.channel_bytes_per_s
        page_rate = flash.lanes * flash.page_bytes * 1e9
        span_bytes = 1 << 30
        link = min(span_bytes * 1e9 / spec.link.transfer_ns(span_bytes), channels, page_rate / timing.read_ns)
        return cls(
            link_bytes_per_s=link,
            port_bytes_per_s=float(network.bytes_per_s) if network else drives * link,
            program_bytes_per_s=min(channels, page_rate / timing.program_ns),
            flash_factor=flash_factor,
            capacity_bytes=flash.capacity_bytes,
            prefill_s=host_s[0],
            step_s=host_s[1],
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost and recovery times of a scheme.

    Attributes:
        storage_bytes: Additional flash in all drives.
        step_bytes: Additional bytes from host to drives per decode step.
        degraded_s: Time from the loss until decode resumes, s; None: never.
        full_s: Time from the loss until full redundancy, s; None: never.
        fits: Whether the fullest drive has enough space.
        is_built: Whether `redundancy=` supports it.
    """

    storage_bytes: float
    step_bytes: float
    degraded_s: float | None
    full_s: float | None
    fits: bool
    is_built: bool = True


def costs(decode: Decode, rates: Rates, parity_drives: int = PARITY_DRIVES) -> dict[Scheme, Cost]:
    """Cost of each scheme that this number of drives allows.

    Args:
        decode: Stored data.
        rates: Rates of drives and host.
        parity_drives: Drives of a parity group without the parity drive (g); at most all drives.
    """
    held, f = decode.drive_bytes, rates.flash_factor
    link, port, program = rates.link_bytes_per_s, rates.port_bytes_per_s, rates.program_bytes_per_s
    fits, computed_s = f * held <= rates.capacity_bytes, rates.prefill_s + decode.decoded * rates.step_s
    filled_s = max(held / link, held / port, f * held / program)
    by_scheme: dict[Scheme, Cost] = {
        "none": Cost(0, 0, None, None, fits),
        "recompute": Cost(0, 0, computed_s, computed_s + filled_s, fits),
    }
    if decode.drives > 1:
        g = min(parity_drives, decode.drives)
        groups = -(-decode.drives // g)
        read_s, has_room = max(held / link, g * held / port), held <= rates.capacity_bytes
        mirrored = decode.drives * f * held, decode.step_bytes
        xored = groups * held, groups * decode.step_bytes / decode.drives
        by_scheme["mirror"] = Cost(*mirrored, 0, 2 * filled_s, 2 * f * held <= rates.capacity_bytes)
        by_scheme["parity"] = Cost(*xored, read_s, max(read_s, filled_s), fits and has_room, is_built=False)
    return {scheme: by_scheme[scheme] for scheme in SCHEMES if scheme in by_scheme}


def cheapest(by_scheme: dict[Scheme, Cost], figure: Figure) -> list[Scheme]:
    """Schemes with the lowest value of a figure among those that survive a loss and fit."""
    values = {scheme: getattr(cost, figure) for scheme, cost in _surviving(by_scheme).items()}
    return [scheme for scheme, value in values.items() if value == min(values.values())]


def is_useful(by_scheme: dict[Scheme, Cost], scheme: Scheme) -> bool:
    """Whether no other surviving scheme has both at most its storage and at most its time until decode resumes."""
    cost, others = by_scheme.get(scheme), _surviving(by_scheme)
    if cost is None or others.pop(scheme, None) is None:
        return False
    return all(
        other.storage_bytes > cost.storage_bytes or (other.degraded_s or 0) > (cost.degraded_s or 0)
        for other in others.values()
    )


def _surviving(by_scheme: dict[Scheme, Cost]) -> dict[Scheme, Cost]:
    return {scheme: cost for scheme, cost in by_scheme.items() if cost.degraded_s is not None and cost.fits}


@frozen_value
class HostCompute:
    """Roofline of a host that computes a model.

    Attributes:
        parameters: Active parameters per token.
        weight_bytes: Bytes of the weights, read in each decode step.
        flop_per_s: Sustained arithmetic rate, FLOP/s.
        memory_bytes_per_s: Memory bandwidth.
    """

    parameters: _Positive
    weight_bytes: _Positive
    flop_per_s: _Positive
    memory_bytes_per_s: _Positive

    @classmethod
    def assumed(cls, parameters: int, weight_bytes: int, on_gpu: bool) -> HostCompute:
        """A CPU or GPU with assumed rates: before the first prefill there is no measurement."""
        flop_per_s, memory_bytes_per_s = (1e14, 1e12) if on_gpu else (1e11, 2e10)
        rates = {"flop_per_s": flop_per_s, "memory_bytes_per_s": memory_bytes_per_s}
        return cls(parameters=float(parameters), weight_bytes=float(weight_bytes), **rates)

    def times_s(self, decode: Decode) -> tuple[float, float]:
        """Prefill, and a decode step at the mean length with its KV data in memory, s; without attention's FLOPs."""
        row_s = 2 * self.parameters * decode.batch / self.flop_per_s
        prompt, read_tokens = decode.tokens - decode.decoded, decode.tokens - decode.decoded / 2
        read_bytes = self.weight_bytes + decode.batch * read_tokens * decode.token_bytes
        return prompt * row_s, max(row_s, read_bytes / self.memory_bytes_per_s)


def flash_factor(spec: DriveSpec, layout: str, shape: ModelShape, tokens: int) -> float:
    """Bytes in flash per byte of a model's KV data in a layout, for sequences of `tokens` tokens."""
    form = layout_named(layout).form(spec.geometry.page_bytes, shape.head_dim, tokens)
    return shape.layers * sum(token_bytes(form, shape.kv_heads).values()) / shape.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs for one decode, and the assumptions. Printing it gives one line."""

    decode: Decode
    rates: Rates
    assumed: str

    @classmethod
    def on(
        cls, spec: DriveSpec, network: Network | None, layout: str, shape: ModelShape, decode: Decode, host: HostCompute
    ) -> Estimate:
        """Estimate for a model in drives. `layout`: name of the layout."""
        prefill_s, step_s = host_s = host.times_s(decode)
        factor = flash_factor(spec, layout, shape, decode.tokens)
        rates = Rates.of(spec, decode.drives, network, factor, host_s)
        assumed = f"assumed on the host: prefill {prefill_s:.3g} s, step {step_s:.3g} s"
        return cls(decode, rates, assumed)

    @property
    def costs(self) -> dict[Scheme, Cost]:
        return costs(self.decode, self.rates)

    def to_dict(self) -> dict[str, Any]:
        """The estimate in the format of `vcsd run -o json`."""
        return {
            "modelled": True,
            "assumed": self.assumed,
            "decode": asdict(self.decode),
            "rates": asdict(self.rates),
            "alternatives": {scheme: asdict(cost) for scheme, cost in self.costs.items()},
            "least": {figure: cheapest(self.costs, figure) for figure in FIGURES},
        }

    def __str__(self) -> str:
        surviving = [
            f"{_format_scheme(scheme, self)} {_format_cost(cost)}"
            for scheme, cost in self.costs.items()
            if scheme != "none"
        ]
        least = (f"least {words}: {_format_schemes(cheapest(self.costs, figure))}" for figure, words in _LEAST)
        size = f"{self.decode.batch:,} x {self.decode.tokens:,} tokens on {self.decode.drives} drives"
        return f"redundancy, modelled ({size}; {self.assumed}): {'; '.join((*surviving, *least))}"


_LEAST: tuple[tuple[Figure, str], ...] = (("storage_bytes", "storage"), ("degraded_s", "time to service"))


def _format_scheme(scheme: Scheme, estimate: Estimate) -> str:
    if scheme != "parity":
        return scheme
    return f"parity {min(PARITY_DRIVES, estimate.decode.drives)}+1 (not built)"


def _format_cost(cost: Cost) -> str:
    room = "" if cost.fits else ", does not fit"
    return (
        f"+{cost.storage_bytes / 1e6:,.3g} MB, +{cost.step_bytes / 1e3:,.3g} kB a step, "
        f"serves after {cost.degraded_s:,.3g} s, redundant after {cost.full_s:,.3g} s{room}"
    )


def _format_schemes(schemes: Sequence[Scheme]) -> str:
    return " or ".join(schemes) or "none fits"
