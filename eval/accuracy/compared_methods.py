"""Who takes part in a comparison of attention methods: methods on drives, by layout and budget, and published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention_engine import METHODS, Methods
from csd_spec import NAMED, CompressionBudget
from csd_spec.sparf import BudgetConvention
from vcsd_eval.accuracy.published import PUBLISHED

DENSE = ("dense", "kivi", "kivi-2")  # attend to all tokens, without a budget
IDEAL = ("sparq", "sparq-logits", "top-k-oracle")
OURS_BEGIN = ("ours", "progressive")  # names of this project's methods
BY_CONVENTION = ("sparf", "sparf-apart", "sparq", "sparq-logits")  # take k itself from the budget, not its bytes


@dataclass(frozen=True, slots=True)
class Contender:
    """A method on a drive, or a published one on arrays.

    Attributes:
        name: Name of the contender in results.
        method: The method's name in its table.
        layout: Name of the layout of the KV cache in drives.
        cache_share: Drive DRAM for hot pages, as a fraction of that copy.
        similar: Similar tokens of the prompt share pages.
        dense: It has no budget, so it is measured once.
        ideal: Not implementable in a drive: it reads bytes without their pages, knows the logits, or moves tokens at no
            cost.
        own: The only budget at which it is evaluated.
        arrays: It is a function on arrays, whose bytes are counted by element; no drive has its layout.
    """

    name: str
    method: str
    layout: str = "fp16"
    cache_share: float = 0
    similar: bool = False
    dense: bool = False
    ideal: bool = False
    own: CompressionBudget | None = None
    arrays: bool = False

    def budgets(self, compressions: Sequence[float]) -> Sequence[float]:
        """Those of some budgets 1/c at which it is worth a try."""
        return [self.own.c] if self.own else [1.0] if self.dense else compressions

    @property
    def conventions(self) -> tuple[BudgetConvention, ...]:
        """How its budget may be counted. Who spends bytes gets them in the `bytes` convention, to compare at equal
        bytes; SparF's k is a share of the tokens, and papers differ in which."""
        return ("bytes", "paper") if self.method in BY_CONVENTION and not self.arrays else ("bytes",)


@dataclass(frozen=True, slots=True)
class Trial:
    """A contender at a budget 1/c, counted by a convention."""

    contender: Contender
    c: float
    convention: BudgetConvention = "bytes"

    @property
    def budget(self) -> CompressionBudget:
        """Budget passed to drives."""
        return self.contender.own or CompressionBudget(self.c, self.convention)

    @property
    def is_dense(self) -> bool:
        """Whether this is dense attention on exact values, with which all others are compared."""
        return self.contender.name == "dense"


def _named(name: str) -> Contender:
    """The method, layout and budget of a name in `NAMED`."""
    what = NAMED[name]
    assert isinstance(what.budget, CompressionBudget)
    return Contender(name, what.method, what.layout, own=what.budget)


OURS = (
    _named("ours"),
    Contender("progressive", "progressive", "progressive"),
    Contender("progressive4", "progressive", "progressive4"),
    Contender("ours-int8", "spending", "int8"),
    Contender("ours-int4", "spending", "int4"),
    Contender("ours-pages", "paged"),
    Contender("ours-similar", "sparf", similar=True, ideal=True),
    Contender("ours-cache", "sparf", cache_share=0.25),
    Contender("ours-pages-top-p", "paged-top-p"),
    Contender("ours-int8-pages", "paged", "int8"),
    Contender("ours-int4-pages", "paged", "int4"),
    Contender("ours-int4-pages-top-p", "paged-top-p", "int4"),
    Contender("ours-int4-pages-similar", "paged", "int4", similar=True, ideal=True),
    Contender("dense-8-bits", "dense", "progressive", dense=True),
)


def on_drives(methods: Methods = METHODS) -> list[Contender]:
    """Every method that drives have as it is known, and ours by the options that they combine."""
    ours = {contender.method for contender in OURS} - {"sparf", "dense"}
    theirs = [name for name in methods if name not in ours]
    return [*(Contender(name, name, dense=name in DENSE, ideal=name in IDEAL) for name in theirs), *OURS]


def contenders(methods: Methods = METHODS) -> list[Contender]:
    """Those on drives, then the published ones on arrays that no method on drives replaces by its name."""
    drives = on_drives(methods)
    taken = {contender.name for contender in drives}
    return drives + [
        Contender(name, name, dense=not published.budgeted, arrays=True)
        for name, published in PUBLISHED.items()
        if name not in taken
    ]


def chosen(names: str | None, candidates: Sequence[Contender]) -> list[Contender]:
    """Contenders by names with commas between them, None for all; raises ValueError for an unknown name."""
    by_name = {contender.name: contender for contender in candidates}
    wanted = dict.fromkeys(by_name if names is None else names.split(","))
    if unknown := [name for name in wanted if name not in by_name]:
        raise ValueError(f"method = {unknown[0]!r}: must be one of {', '.join(sorted(by_name))}")
    return [by_name[name] for name in wanted]


def trials(compared: Sequence[Contender], compressions: Sequence[float]) -> list[Trial]:
    """Every contender at every budget 1/c, in each of its conventions; methods without a budget once, at 1, and
    those with a budget of their own at that."""
    return [
        Trial(contender, c, convention)
        for contender in compared
        for c in contender.budgets(compressions)
        for convention in ((contender.own.convention,) if contender.own else contender.conventions)
    ]
