"""Output errors, and pages that SparF touches, of both sides on the same recorded rows of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vcsd.loading import load
from vcsd.progress import Tick
from vcsd_eval.accuracy import texts
from vcsd_eval.accuracy.compared_methods import Trial, contenders
from vcsd_eval.accuracy.errors import measured
from vcsd_eval.accuracy.layers import Passages, record_layers
from vcsd_eval.papers.instinfer.page_shares import page_shares
from vcsd_eval.papers.instinfer.systems import OURS

SPARF_BUDGET = 8.0  # 1/8 of the tokens, the budget that the paper's systems are timed at
BUDGETS = (5.0, 5.5, 6.0, 6.5, 7.0, 8.0)  # our budgets, 1/c of the bytes
TICKS = 2 + len(BUDGETS)
PASSAGES = Passages()


def default_c() -> float:
    """The compression that `ours` has by default."""
    assert OURS.compression is not None
    return OURS.compression


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """Errors on recorded rows.

    Attributes:
        model: Name of the recorded model.
        sparf_error: Mean relative error of SparF's outputs at 1/8, in the paper's convention of budgets.
        ours_error: Mean relative error of `progressive`, by the compression c of its bytes.
        sparf_bytes, ours_bytes: Bytes that cross the flash channels over those of the KV data in FP16: of SparF, and of
            ours at its default budget.
        page_share: Share of the token pages that SparF touches at 1/8.
    """

    model: str
    sparf_error: float
    ours_error: Mapping[float, float]
    sparf_bytes: float
    ours_bytes: float
    page_share: float

    @property
    def equal_c(self) -> float:
        """The compression at which ours errs as much as SparF; log error interpolated over 1 / c, never beyond."""
        shares = np.array([1 / c for c in self.ours_error])
        errors = np.log(list(self.ours_error.values()))
        order = np.argsort(errors)
        return float(1 / np.interp(math.log(self.sparf_error), errors[order], shares[order]))


def record(
    model: Path, text: Path | None, tokens_of_page: int, tick: Tick, budgets: Sequence[float] = BUDGETS
) -> RecordedRows:
    """Record a model on a text, and try both methods on its rows; ticks TICKS times.

    Args:
        model: Folder of the model.
        text: A file or a name of `vcsd_eval.accuracy.texts`; None for the shipped one.
        tokens_of_page: Tokens of K or V in a page of the modelled drive.
        tick: Called after each part.
        budgets: Compressions at which ours is tried.
    """
    loaded, tokenizer = load(model)
    layers = record_layers(loaded, tokenizer, texts.read(text), PASSAGES)
    by_name = {contender.name: contender for contender in contenders()}
    share = page_shares([layer.recorded for layer in layers], [SPARF_BUDGET], tokens_of_page)[SPARF_BUDGET]
    tick(None)

    def tried(trial: Trial) -> tuple[float, float]:
        row, _ = measured(trial, layers)
        tick(None)
        return row["output_rel_error"], row["bytes_fetched_share"]

    sparf_error, sparf_bytes = tried(Trial(by_name["sparf"], SPARF_BUDGET, "paper"))
    ours = {c: tried(Trial(by_name["progressive"], c)) for c in budgets}
    return RecordedRows(
        model=model.name,
        sparf_error=sparf_error,
        ours_error={c: error for c, (error, _) in ours.items()},
        sparf_bytes=sparf_bytes,
        ours_bytes=ours[default_c()][1],
        page_share=share,
    )
