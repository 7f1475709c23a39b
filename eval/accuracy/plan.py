"""The plan of an accuracy measurement: methods at compressions on a task, and the record of each turn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from attention_engine import METHODS, Methods
from csd_spec import CompressionBudget
from csd_spec.checked import frozen_value
from csd_spec.layouts import layout_named
from csd_spec.sparf import BudgetConvention
from vcsd.options import MAX_SEED
from vcsd_eval.accuracy.compared_methods import Contender, Trial, chosen, on_drives
from vcsd_eval.accuracy.tasks import TASKS

ConventionChoice = Literal["both", "bytes", "paper"]
DENSE, SPARF = "dense", "sparf"
Counts = dict[str, tuple[float, float]]  # a sample's figures: numerator and denominator of each


def contenders(names: str, methods: Methods = METHODS) -> list[Contender]:
    """Methods by names with commas between them: those of a table, `ours`, and variants of it that need no set-up."""
    return chosen(names, [c for c in on_drives(methods) if not (c.cache_share or c.similar)])


def default_samples(task: str) -> int:
    """Default number of samples of a task; raises ValueError for an unknown one."""
    if task not in TASKS:
        raise ValueError(f"task = {task!r}: must be one of {', '.join(TASKS)}")
    return TASKS[task].samples


@dataclass(frozen=True, slots=True)
class AccuracyOptions:
    """The task and its samples."""

    task: Annotated[str, typer.Option(help="name of a task, see docs/accuracy.md")]
    data: Annotated[
        Path | None, typer.Option(help="data file as published (default: by its usual name in $VCSD_DATA)")
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 20, help="number of samples, limited by the file (default: 8; passkey: 15, squad: 24)"
        ),
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=1,
            max=1 << 20,
            help="length of a sample, tokens (default: 2048, or the model's limit if smaller)",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of samples and confidence intervals")] = 0
    shots: Annotated[
        int, typer.Option(min=0, max=64, help="number of solved examples before a question (squad, triviaqa)")
    ] = 4
    confusions: Annotated[
        int,
        typer.Option(min=0, max=64, help="number of backgrounds without the answer in a question (squad, triviaqa)"),
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan(AccuracyOptions):
    """The measurement: samples of a task, and the trials on them.

    Attributes:
        methods: Methods that have rows. Dense attention is measured in any case.
        compressions: Every method is run at each, dense at 1 alone.
        convention: What compressions count; `both` runs SparF in both, and the others in `bytes`.
        drives: Drives that share the heads.
        own_methods: File that some of the methods are from.
    """

    samples: int
    max_context: int
    methods: tuple[Contender, ...]
    compressions: tuple[float, ...]
    convention: ConventionChoice
    drives: int
    own_methods: Path | None = None

    def __post_init__(self) -> None:
        default_samples(self.task)
        if self.samples < 1:
            raise ValueError(f"samples = {self.samples}: at least 1 is needed")
        if self.convention not in get_args(ConventionChoice):
            raise ValueError(
                f"convention = {self.convention!r}: must be one of {', '.join(get_args(ConventionChoice))}"
            )
        for c in self.compressions:
            CompressionBudget(c)

    def trials(self) -> list[Trial]:
        """Dense attention, then every method at every budget; those of one storage format together, FP16 first."""
        asked = [each for each in self.methods if each.name != DENSE]
        every = [*contenders(DENSE), *asked]
        trials = [trial for each in every for trial in self._trials_of(each)]
        layouts = {trial: layout_named(trial.contender.layout) for trial in trials}
        return sorted(trials, key=lambda trial: (not layouts[trial].keeps_rows, -layouts[trial].bits))

    def shown(self) -> list[Trial]:
        """Trials with rows, in the requested order of methods."""
        names = [each.name for each in self.methods]
        shown = [trial for trial in self.trials() if trial.contender.name in names]
        return sorted(shown, key=lambda trial: names.index(trial.contender.name))

    def _trials_of(self, each: Contender) -> list[Trial]:
        if each.own:
            return [Trial(each, each.own.c, each.own.convention)]
        if self.convention != "both":
            return [Trial(each, c, self.convention) for c in each.budgets(self.compressions)]
        trials = [Trial(each, c, "bytes") for c in each.budgets(self.compressions)]
        if each.name == SPARF:
            trials += [Trial(each, trial.c, "paper") for trial in trials if trial.c > 1]
        return trials


@frozen_value
class Turn:
    """One trial on one batch: counts of each sample, and bytes by the drives' account."""

    batch: int
    method: str
    compression: float
    convention: BudgetConvention
    samples: list[Counts]
    groups: list[str]
    useful_bytes: int
    fetched_bytes: int
    dense_bytes: int

    def is_of(self, trial: Trial) -> bool:
        """Whether this is a turn of a trial."""
        return (self.method, self.compression, self.convention) == (trial.contender.name, trial.c, trial.convention)
