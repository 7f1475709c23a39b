"""The plan of an accuracy measurement: methods at compressions on a task, and the record of each turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from attention_engine import METHODS, Methods
from csd_spec import CompressionBudget
from csd_spec.checked import frozen_value
from csd_spec.layouts import layout_named
from csd_spec.sparf import BudgetConvention
from vcsd_eval.accuracy.compared_methods import Contender, Trial, on_drives
from vcsd_eval.accuracy.tasks import TASKS

ConventionChoice = Literal["both", "bytes", "paper"]
DENSE, SPARF = "dense", "sparf"
Counts = dict[str, tuple[float, float]]  # a sample's figures: numerator and denominator of each


def contenders(names: Iterable[str], methods: Methods = METHODS) -> list[Contender]:
    """Methods by name: those of a table, `ours`, and variants of it that need no set-up."""
    known = {each.name: each for each in on_drives(methods) if not (each.cache_share or each.similar)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"method = {unknown[0]!r}: must be one of {', '.join(sorted(known))}")
    return [known[name] for name in dict.fromkeys(names)]


def default_samples(task: str) -> int:
    """Default number of samples of a task; raises ValueError for an unknown one."""
    if task not in TASKS:
        raise ValueError(f"task = {task!r}: must be one of {', '.join(TASKS)}")
    return TASKS[task].samples


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """The measurement.

    Attributes:
        task: A key of `TASKS`.
        data: The task's file; None for a task without one.
        methods: Methods that have rows. Dense attention is measured in any case.
        compressions: Every method is run at each, dense at 1 alone.
        convention: What compressions count; `both` runs SparF in both, and the others in `bytes`.
        samples: Samples at most.
        drives: Drives that share the heads.
        max_context: Tokens of a sample at most.
        seed: Seed of the samples and of the bootstrap.
        shots, confusions: Solved examples and confusing backgrounds of a question, see `Room`.
        own_methods: File that some of the methods are from.
    """

    task: str
    data: Path | None
    methods: tuple[Contender, ...]
    compressions: tuple[float, ...]
    convention: ConventionChoice
    samples: int
    drives: int
    max_context: int
    seed: int
    shots: int = 4
    confusions: int = 0
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
        every = [*contenders([DENSE]), *asked]
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
