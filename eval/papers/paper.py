"""A paper: the values that it prints, what fixed our model's constants, and one judge of all errors.

A paper is a folder: claims (`claims.csv`), constants (`constants.py`) and a function that computes our value for each
claim (`evaluate.py`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vcsd_eval.papers.claims import MAX_PERCENT, Claim, ClaimKind, Source
from vcsd_eval.papers.options import MachineOptions, Simulated

FOLLOWS = (ClaimKind.DERIVED, ClaimKind.PREDICTED)
Rows = Sequence[Mapping[str, Any]]
FACTORS: dict[str, float] = {}  # of constants in this process, by key; set before a paper's modules are imported


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that the paper does not give: assumed, or calibrated, fixed by claims of it; why it may be so.

    key: of FACTORS; by default the name.
    """

    name: str
    value: float
    unit: str
    why: str
    fixed_by: str = ""
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.key:  # the value has been multiplied where it was read
            return
        object.__setattr__(self, "key", self.name)
        if self.key in FACTORS:
            object.__setattr__(self, "value", self.value * FACTORS[self.key])


@dataclass(frozen=True, slots=True)
class Chart:
    """Data of a chart.

    Attributes:
        kind: `lines`: one for each value of `series`. `stack`: a bar for each row, named by `series` and `x`.
        rows: Rows with the columns below; a row without a value is not drawn.
        x: Column of the x axis; of a stack, the second part of a bar's name.
        y: Column of the y axis; of a stack, columns of the parts of a bar, which add up.
        series: Column of names.
        units: Quantity and unit by column, for the titles of axes; `y` is that of a stack's values.
    """

    kind: Literal["lines", "stack"]
    rows: Rows
    x: str
    y: Sequence[str]
    series: str
    units: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report: a chart, some columns of rows, or a value with parts.

    Attributes:
        title: Heading; empty if the part belongs to the one before it.
        command: Command that prints the same; empty if only the report has it.
    """

    title: str
    chart: Chart | None = None
    rows: Rows = ()
    columns: Sequence[str] = ()
    value: Mapping[str, Any] | None = None
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of a paper's function.

    Attributes:
        values: Our value by id of a claim, in the claim's unit. An input without one is taken as printed; a value that
            is not determined or not modelled may lack one.
        engine: Simulated value by id, in addition to that of a formula or a count.
        columns: Values under other conditions, by column and id; a column may lack ids.
        more: Further entries of the JSON result.
        notes: Lines for the terminal.
        extent: How the values were obtained, for titles.
        sections: Figures; empty unless requested.
    """

    values: Mapping[str, float]
    engine: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    extent: str = "modelled"
    sections: Sequence[Section] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper: its claims, and the function that computes our values.

    Attributes:
        name: As `vcsd eval claims --paper` takes it.
        evaluate: Called with machine, how much is simulated, and whether figures are requested.
        commands: Command that shows our value by id; `vcsd eval claims --paper NAME` for all others.
        values: Our values alone, where `evaluate` does more than they need.
    """

    name: str
    title: str
    claims: Sequence[Claim]
    calibrated: Sequence[Constant]
    assumed: Sequence[Constant]
    evaluate: Callable[[MachineOptions, Simulated, bool], Evaluation]
    commands: Mapping[str, str] = field(default_factory=dict)
    values: Callable[[], Mapping[str, float]] | None = None


def judge(paper: Paper, evaluation: Evaluation) -> dict[str, Any]:
    """Join a paper's claims with our values.

    Returns:
        Rows, those that are off, constants, counts by kind, and errors of rows that follow from the model: of all, by
        source, and of independent ones, which are predicted and no bounds. `dof`: constants that are not printed.

    Raises:
        ValueError: A computed value has no claim, or a claim lacks the value that its kind requires.
    """
    if unknown := sorted({*evaluation.values, *evaluation.engine} - {claim.id for claim in paper.claims}):
        raise ValueError(f"{paper.name}: claims.csv has no row for {', '.join(unknown)}")
    rows = [_row(paper, claim, evaluation) for claim in paper.claims]
    predicted = [(claim, row) for claim, row in zip(paper.claims, rows, strict=True) if claim.kind in FOLLOWS]
    errors = {claim.id: abs(row["error_percent"]) for claim, row in predicted}
    independent = [errors[claim.id] for claim, _ in predicted if claim.kind is ClaimKind.PREDICTED and not claim.bound]
    off = [claim.id for claim, row in predicted if claim.is_off(row["ours"])]
    kinds = Counter(claim.kind for claim in paper.claims)
    reason = "beyond what the model explains; nothing was fitted to it"
    return {
        "rows": rows,
        "counts": {str(kind): kinds[kind] for kind in ClaimKind},
        "exceptions": [{"id": claim, "reason": reason} for claim in off],
        "calibrated": [asdict(constant) for constant in paper.calibrated],
        "assumed": [
            {key: value for key, value in asdict(constant).items() if key != "fixed_by"} for constant in paper.assumed
        ],
        "median_error_percent": statistics.median(errors.values()),
        "worst_error_percent": max(errors.values()),
        "worst_row": max(errors, key=lambda claim: errors[claim]),
        "by_source": {
            str(source): _spread([errors[claim.id] for claim, _ in predicted if claim.source is source])
            for source in Source
        },
        "predicted_rows": len(errors),
        "rows_beyond_15_percent": sum(error > MAX_PERCENT for error in errors.values()),
        "independent_rows": len(independent),
        "independent_median_error_percent": statistics.median(independent) if independent else None,
        "dof": len(paper.calibrated) + len(paper.assumed),
        **evaluation.more,
    }


def _spread(errors: list[float]) -> dict[str, Any]:
    """Number, median and maximum of errors, percent; None for both without any."""
    return {
        "rows": len(errors),
        "median_error_percent": statistics.median(errors) if errors else None,
        "worst_error_percent": max(errors, default=None),
    }


def _row(paper: Paper, claim: Claim, evaluation: Evaluation) -> dict[str, Any]:
    """A claim with our value, as in the JSON result."""
    ours = evaluation.values.get(claim.id, claim.value if claim.kind is ClaimKind.INPUT else None)
    engine = evaluation.engine.get(claim.id)
    if ours is None and claim.kind not in (ClaimKind.UNDETERMINED, ClaimKind.UNMODELLED):
        raise ValueError(f"{paper.name}: {claim.id} is {claim.kind} and needs a computed value: add it to evaluate")
    unit = "" if claim.unit == "x" else f", {claim.unit}"
    return {
        "id": claim.id,
        "text": f"{claim.what}{unit} ({claim.page})",
        "page": claim.page,
        "quote": claim.quote or None,
        "paper": claim.value,
        "ours": ours,
        "kind": str(claim.kind),
        "source": claim.source and str(claim.source),
        "error_percent": None if ours is None else claim.error_percent(ours),
        "engine": engine,
        "engine_error_percent": None if engine is None else claim.error_percent(engine),
        **{name: values.get(claim.id) for name, values in evaluation.columns.items()},
        **({"reason": claim.reason} if claim.reason else {}),
        "command": paper.commands.get(claim.id, f"vcsd eval claims --paper {paper.name}"),
    }
