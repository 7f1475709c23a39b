"""What a paper is here: the values that it prints and what fixed ours, with one judge of all kinds and errors.

A paper is a module of values (`Claim`s and `Constant`s) and a function that says what ours is for each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from eval.papers.options import Machine, Simulated

MAX_PERCENT, MAX_POINTS = 15.0, 3.0  # of error, the latter for values in percent: what a model explains


class Kind(StrEnum):
    """What a printed value is to our model."""

    INPUT = "input"  # taken as it is: the model starts from it, or has nothing to say about it
    CALIBRATED = "calibrated"  # a constant was fitted to it
    PREDICTED = "predicted"  # follows, with nothing fitted
    CONTRADICTION = "contradiction"  # does not agree with the paper's other values, or lacks what it follows from
    UNMODELLED = "not modelled"  # needs hardware that is not modelled; printed, so that no value is left out


WITH_REASON = (Kind.CONTRADICTION, Kind.UNMODELLED)


@dataclass(frozen=True, slots=True)
class Claim:
    """One value that a paper prints.

    source: its section, table or figure. command: what shows ours. bound: "<" or ">" where the paper prints a bound.
    reason: what a contradiction contradicts, or lacks; what a value would need that is not modelled.
    """

    id: str
    text: str
    value: float
    unit: str
    source: str
    kind: Kind = Kind.PREDICTED
    command: str = ""
    bound: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.kind in WITH_REASON) != bool(self.reason):
            raise ValueError(f"{self.id}: a contradiction, or what is not modelled, has a reason, and nothing else has")

    def error_percent(self, ours: float) -> float:
        """How far off a value is, 0 within a bound; of 0, in percent of one."""
        if (self.bound == "<" and ours < self.value) or (self.bound == ">" and ours > self.value):
            return 0.0
        return 100 * (ours / self.value - 1) if self.value else 100 * ours

    def is_off(self, ours: float) -> bool:
        """Whether a value is further from the paper's than what a model explains."""
        if not self.error_percent(ours):
            return False
        if self.unit == "%":
            return abs(ours - self.value) > MAX_POINTS
        return abs(self.error_percent(ours)) > MAX_PERCENT


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that the paper does not give: assumed, or calibrated, fixed by claims of it; why it may be so."""

    name: str
    value: float
    unit: str
    why: str
    fixed_by: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report: a picture, some columns of rows, or a value with parts."""

    title: str
    picture: Any = None
    rows: Sequence[Mapping[str, Any]] = ()
    columns: Sequence[str] = ()
    value: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a paper's function has found.

    ours: our value for each claim by its id, None where none can be had. columns: values under other conditions, by
    column and id, of claims that have one. more: what else programs may want to know. notes: lines for people. extent:
    what the values are. sections: figures, where they were asked for.
    """

    ours: Mapping[str, float | None]
    columns: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    extent: str = "modelled"
    sections: Sequence[Section] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper: its values, and how ours are found; `find(machine, simulated, figures)` finds figures if asked.

    counted: ids of predicted claims that are counts, or follow by algebra from inputs and calibrated constants: that
    they are right says little about the model.
    """

    title: str
    claims: Sequence[Claim]
    calibrated: Sequence[Constant]
    assumed: Sequence[Constant]
    find: Callable[[Machine, Simulated, bool], Found]
    counted: frozenset[str] = frozenset()


def judge(paper: Paper, found: Found) -> dict[str, Any]:
    """A paper's values beside ours: rows, those that are off, constants, and the errors of what was predicted."""
    rows = [_row(claim, found) for claim in paper.claims]
    predicted = [(claim, row) for claim, row in zip(paper.claims, rows, strict=True) if claim.kind is Kind.PREDICTED]
    errors = {claim.id: abs(row["error_percent"]) for claim, row in predicted}
    independent = [error for each, error in errors.items() if each not in paper.counted]
    off = [claim.id for claim, row in predicted if claim.is_off(row["ours"])]
    reason = "beyond what the model explains; nothing was fitted to it"
    return {
        "rows": rows,
        "exceptions": [{"id": each, "reason": reason} for each in off],
        "calibrated": [asdict(each) for each in paper.calibrated],
        "assumed": [{key: value for key, value in asdict(each).items() if key != "fixed_by"} for each in paper.assumed],
        "median_error_percent": statistics.median(errors.values()),
        "worst_error_percent": max(errors.values()),
        "worst_row": max(errors, key=lambda each: errors[each]),
        "predicted_rows": len(errors),
        "rows_beyond_15_percent": sum(error > MAX_PERCENT for error in errors.values()),
        "independent_rows": len(independent),
        "independent_median_error_percent": statistics.median(independent),
        **found.more,
    }


def _row(claim: Claim, found: Found) -> dict[str, Any]:
    ours = found.ours[claim.id]
    if ours is None and claim.kind not in WITH_REASON:
        raise ValueError(f"{claim.id}: only a contradiction, or what is not modelled, may be without a value of ours")
    unit = "" if claim.unit == "x" else f", {claim.unit}"
    return {
        "id": claim.id,
        "text": f"{claim.text}{unit} ({claim.source})",
        "paper": claim.value,
        "ours": ours,
        "kind": str(claim.kind),
        "error_percent": None if ours is None else claim.error_percent(ours),
        **{name: values.get(claim.id) for name, values in found.columns.items()},
        **({"reason": claim.reason} if claim.reason else {}),
        "command": claim.command,
    }
