"""A headline: how much better one system is than another, under equal conditions, with the range of its constants."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from csd_spec import DriveSpec

T = TypeVar("T")
CONDITIONS = ("as_published", "same_schedule", "same_error", "same_hardware_plain_ssd", "same_service")
FACTORS = (0.5, 2.0)  # by which each constant is multiplied in turn


@dataclass(frozen=True, slots=True)
class HeadlineFigure:
    """A ratio, its least and its greatest value over constants halved or doubled or over settings, and its command."""

    value: float
    low: float
    high: float
    command: str

    @classmethod
    def over(cls, ratios: Sequence[float], command: str) -> HeadlineFigure:
        """The median of ratios over settings."""
        return cls(statistics.median(ratios), min(ratios), max(ratios), command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A comparison under several conditions.

    Attributes:
        what: The ratio, in words.
        figures: By condition; all of CONDITIONS, and further ones.
        others: The same figures under another assumption, by its name.
        tornado: Rows of the constants: `constant, base, unit, half, double` for a condition.
        loses_at: Settings in which the other system is better, a row each: `setting, value, ratio`.
        notes: Lines for people.
    """

    what: str
    figures: Mapping[str, HeadlineFigure]
    others: Mapping[str, Mapping[str, HeadlineFigure]] = field(default_factory=dict)
    tornado: Sequence[Mapping[str, Any]] = ()
    loses_at: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if missing := set(CONDITIONS) - set(self.figures):
            raise ValueError(f"{self.what}: has no figure for {', '.join(sorted(missing))}")

    def with_others(self, others: Mapping[str, Mapping[str, HeadlineFigure]], notes: Sequence[str]) -> Headline:
        """The same headline with figures under other assumptions, and their notes."""
        return replace(self, others={**self.others, **others}, notes=[*self.notes, *notes])

    def as_json(self) -> dict[str, Any]:
        """The headline as the JSON result has it."""
        whole = {"what": self.what, **{name: asdict(figure) for name, figure in self.figures.items()}}
        whole |= {name: {at: asdict(each) for at, each in few.items()} for name, few in self.others.items()}
        return whole | {"tornado": [*self.tornado], "loses_at": [*self.loses_at], "notes": [*self.notes]}


@dataclass(frozen=True, slots=True)
class Varied(Generic[T]):
    """A constant of a setup, and the setup with that constant multiplied by a factor."""

    name: str
    base: float
    unit: str
    scaled: Callable[[float], T]


@dataclass(frozen=True, slots=True)
class Ranged(Generic[T]):
    """Ratios of a setup, by condition, and of all setups in which one constant is halved or doubled."""

    base: Mapping[str, float]
    rows: Sequence[tuple[Varied[T], Mapping[str, float], Mapping[str, float]]]

    @classmethod
    def of(cls, setup: T, varied: Sequence[Varied[T]], ratios: Callable[[T], Mapping[str, float]]) -> Ranged[T]:
        """Evaluate ratios of a setup with each constant as it is, halved and doubled."""
        half, double = FACTORS
        return cls(
            ratios(setup),
            [(variation, ratios(variation.scaled(half)), ratios(variation.scaled(double))) for variation in varied],
        )

    def figure(self, name: str, command: str) -> HeadlineFigure:
        """A ratio with its range."""
        values = [self.base[name], *(both[name] for _, *halves in self.rows for both in halves)]
        return HeadlineFigure(self.base[name], min(values), max(values), command)

    def tornado(self, name: str) -> Iterator[dict[str, Any]]:
        """The constants by how far they move a ratio, the one that moves it most first."""
        rows = sorted(self.rows, key=lambda row: -abs(row[2][name] - row[1][name]))
        for variation, half, double in rows:
            row = {"condition": name, "constant": variation.name, "base": variation.base, "unit": variation.unit}
            yield row | {"half": half[name], "double": double[name]}


DRIVE = (  # part of a `DriveSpec`, constant, unit
    ("engine", "lanes", "multiply-accumulates a cycle"),
    ("engine", "softmax_ways", "scores a cycle"),
    ("engine", "topk_ways", "scores a cycle"),
    ("engine", "nfc_bytes_per_cycle", "bytes"),
    ("timing", "read_ns", "ns"),
    ("timing", "channel_bytes_per_s", "bytes/s"),
    ("link", "bytes_per_s", "bytes/s"),
    ("link", "command_ns", "ns"),
)


def varied_drive(spec: DriveSpec, change: Callable[[DriveSpec], T], names: Sequence[str] = ()) -> list[Varied[T]]:
    """Constants of a drive.

    Args:
        spec: The drive.
        made: The setup with another drive.
        names: Constants to vary, `part.constant`; all by default.
    """

    def scaled(part: str, name: str, factor: float) -> T:
        inner = getattr(spec, part)
        changed = replace(inner, **{name: max(1, round(factor * getattr(inner, name)))})
        return change(replace(spec, **{part: changed}))

    return [
        Varied(f"{part}.{name}", getattr(getattr(spec, part), name), unit, partial(scaled, part, name))
        for part, name, unit in DRIVE
        if not names or f"{part}.{name}" in names
    ]
