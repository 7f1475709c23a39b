"""Values that papers print, each a row of `eval/papers/NAME/claims.csv`, checked when the file is read."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from csd_spec.checked import adapter, format_error, frozen_value

FOLDER = Path(__file__).parent
MAX_PERCENT, MAX_POINTS = 15.0, 3.0  # largest error that a model explains, the latter for values in percent
Text = Annotated[str, Field(min_length=1)]


class ClaimKind(StrEnum):
    """Relation of a printed value to our model."""

    INPUT = "input"  # taken as printed: an input of the model, or outside its scope
    CALIBRATED = "calibrated"  # a constant was fitted to it
    DERIVED = "derived"  # a count, or algebra on input and calibrated values: weak evidence for the model
    PREDICTED = "predicted"  # follows from the model, with nothing fitted
    CONTRADICTS = "contradicts"  # disagrees with values of the same paper or with its equations, which the reason names
    UNDETERMINED = "not determined"  # depends on values that are not printed
    UNMODELLED = "not modelled"  # needs hardware that is not modelled; printed, so that no value is left out


class Source(StrEnum):
    """How our value is obtained."""

    ENGINE = "engine"  # simulated, transfer by transfer or step by step
    FORMULA = "formula"  # closed form
    COUNT = "count"  # bytes, blocks, combinations: no time in it


WITH_REASON = (ClaimKind.CONTRADICTS, ClaimKind.UNDETERMINED, ClaimKind.UNMODELLED)
COMPUTED = (
    ClaimKind.CALIBRATED,
    ClaimKind.DERIVED,
    ClaimKind.PREDICTED,
    ClaimKind.CONTRADICTS,
)  # our value is required


@frozen_value
class Claim:
    """One value that a paper prints.

    Attributes:
        id: Unique within a paper.
        page: Section, table or figure that prints it.
        quote: Words that print the value, or the cell of a table; empty if we have not seen the text.
        what: The quantity, in our words.
        value: The printed number, in `unit`.
        bound: "<" or ">" if the paper prints a bound.
        source: How our value is obtained; None if we compute none.
        reason: Contradicted source, or missing input or model; empty for all other kinds.
    """

    id: Annotated[str, Field(pattern=r"^[a-z]+[0-9]+[a-z]?(-[a-z0-9]+)?$")]
    page: Text
    quote: str = ""
    what: Text
    value: float
    unit: Text
    bound: Literal["", "<", ">"] = ""
    kind: ClaimKind = ClaimKind.PREDICTED
    source: Source | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.kind in WITH_REASON and not self.reason:
            raise ValueError(f"reason: must not be empty for kind = {self.kind}")
        if self.kind not in WITH_REASON and self.reason:
            raise ValueError(f"reason: only {', '.join(WITH_REASON)} have one, kind = {self.kind} must have none")
        if self.kind in COMPUTED and not self.source:
            raise ValueError(f"source: must be one of {', '.join(Source)} for kind = {self.kind}")

    def error_percent(self, ours: float) -> float:
        """Error of our value; 0 if a bound is met, in percent of 1 if the printed value is 0."""
        if (self.bound == "<" and ours < self.value) or (self.bound == ">" and ours > self.value):
            return 0.0
        return 100 * (ours / self.value - 1) if self.value else 100 * ours

    def is_off(self, ours: float) -> bool:
        """Whether the difference from the printed value is larger than the model's tolerance."""
        if not self.error_percent(ours):
            return False
        if self.unit == "%":
            return abs(ours - self.value) > MAX_POINTS
        return abs(self.error_percent(ours)) > MAX_PERCENT


COLUMNS = ("id", "page", "quote", "what", "value", "unit", "bound", "kind", "source", "reason")


@cache
def claims_of(paper: str) -> tuple[Claim, ...]:
    """Claims of a paper of `vcsd_eval.papers.compare.PAPERS`, in the order of its file."""
    return read_claims(FOLDER / paper.replace("-", "_") / "claims.csv")


def printed(paper: str) -> dict[str, float]:
    """Printed values of a paper by id."""
    return {claim.id: claim.value for claim in claims_of(paper)}


def read_claims(path: Path) -> tuple[Claim, ...]:
    """Read a file of claims.

    Raises:
        ValueError: A row is invalid or an id is used twice; one line that names file and line.
    """
    claims: dict[str, Claim] = {}
    lines: dict[str, int] = {}
    for line, cells in _rows(path):
        try:
            claim: Claim = adapter(Claim).validate_strings(cells)
        except ValidationError as error:
            raise ValueError(f"{path}:{line}: {format_error(error, Claim)}") from None
        if claim.id in claims:
            raise ValueError(
                f"{path}:{line}: id {claim.id} is already used in line {lines[claim.id]}: ids must be unique"
            )
        claims[claim.id], lines[claim.id] = claim, line
    return tuple(claims.values())


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line numbers of all rows after the header, and their cells that are not empty, by column."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            if (header := next(reader, [])) != list(COLUMNS):
                raise ValueError(f"{path}:1: columns are {','.join(header)}, must be {','.join(COLUMNS)}")
            for cells in reader:
                if len(cells) != len(COLUMNS):
                    raise ValueError(f"{path}:{reader.line_num}: {len(cells)} cells, must be {len(COLUMNS)}")
                yield reader.line_num, {name: cell for name, cell in zip(COLUMNS, cells, strict=True) if cell}
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from None
