"""A run of the leaderboard: every method on every task at every context length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_engine import Methods
from host_driver.hf.shape import placement
from vcsd.progress import Tick
from vcsd_eval.accuracy.compared_methods import Contender, Trial
from vcsd_eval.accuracy.errors import measured
from vcsd_eval.accuracy.intervals import bootstrap
from vcsd_eval.accuracy.layers import Layer, Passages, layer_numbers, record_layers
from vcsd_eval.accuracy.leaderboard.board_tasks import BOARD_TASKS
from vcsd_eval.accuracy.measure import BATCH, measure_accuracy
from vcsd_eval.accuracy.plan import ConventionChoice, MeasurementPlan
from vcsd_eval.accuracy.tasks import TASKS, Room
from vcsd_eval.partial_results import ResultCache

Row = dict[str, Any]
STEPS = 2  # decode steps of each passage of output-error


@dataclass(frozen=True, slots=True)
class BoardText:
    """Text of the samples.

    Attributes:
        name: Name in rows.
        text: The text.
        path: File with the same text.
    """

    name: str
    text: str
    path: Path


@dataclass(frozen=True, slots=True)
class BoardPlan:
    """The run.

    Attributes:
        tasks: Keys of `BOARD_TASKS`.
        contexts: Lengths of a sample, tokens.
        methods: Methods; those on arrays take part in output-error alone.
        compressions: Values c of the budgets 1/c.
        convention: What budgets count, as in `MeasurementPlan`.
        samples: Number of samples, and of passages of output-error.
        drives: Drives that share the heads.
        seed: Seed of the samples and of the bootstrap.
        own_methods: File that some of the methods are from.
    """

    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    methods: tuple[Contender, ...]
    compressions: tuple[float, ...]
    convention: ConventionChoice
    samples: int
    drives: int
    seed: int
    own_methods: Path | None = None

    def on_drives(self, task: str, context: int, text: BoardText) -> MeasurementPlan:
        """The measurement of a task at a context length."""
        known = BOARD_TASKS[task]
        runnable = [each for each in self.methods if not (each.arrays or each.cache_share or each.similar)]
        return MeasurementPlan(
            task=known.source,
            data=text.path if known.reads_text else None,
            methods=tuple(runnable),
            compressions=self.compressions,
            convention=self.convention,
            samples=self.samples,
            drives=self.drives,
            max_context=context,
            seed=self.seed,
            own_methods=self.own_methods,
        )

    def on_recorded(self, context: int, text: BoardText) -> list[Trial]:
        """Trials of output-error, dense attention first."""
        return replace(self.on_drives("perplexity", context, text), methods=self.methods).shown()


def parts_of(plan: BoardPlan, model: PreTrainedModel, text: BoardText) -> int:
    """Number of ticks of a run."""
    layers = len(layer_numbers(None, model.config.get_text_config(decoder=True).num_hidden_layers))
    count = 0
    for context in plan.contexts:
        for task in plan.tasks:
            if task == "output-error":
                count += plan.samples + layers * len(plan.on_recorded(context, text))
            else:
                count += -(-plan.samples // BATCH) * len(plan.on_drives(task, context, text).trials())
    return count


def check_run(plan: BoardPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: BoardText) -> None:
    """Raise ValueError, before any measurement, for a context or a text of which no samples can be made."""

    def encode(written: str) -> list[int]:
        ids: list[int] = tokenizer(written, verbose=False)["input_ids"]
        return ids

    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", max(plan.contexts))
    if beyond := [context for context in plan.contexts if not 128 <= context <= limit]:
        raise ValueError(f"contexts = {beyond[0]}: must be from 128 to the model's context of {limit} tokens")
    if any(BOARD_TASKS[task].reads_text for task in plan.tasks):
        ids, wanted = len(encode(text.text)), max(plan.contexts) + plan.samples
        if ids < wanted:
            raise ValueError(
                f"the text {text.name} has {ids} tokens: contexts and samples need {wanted}; give a longer --text"
            )
    for task in (name for name in plan.tasks if BOARD_TASKS[name].source):
        for context in plan.contexts:
            measurement = plan.on_drives(task, context, text)
            try:
                TASKS[measurement.task].make(measurement.data, Room(encode, context), 1, plan.seed)
            except ValueError as error:
                raise ValueError(f"{task}: {str(error).replace('--max-model-len', 'contexts')}") from error


@dataclass(slots=True)
class BoardRun:
    """A run, and the results that it keeps while it lasts.

    Attributes:
        model, tokenizer: The model in FP32 on the CPU, and its tokenizer.
        plan: The run.
        text: Text of the samples.
        known: Attention methods by name.
        kept: Results of parts that are done.
        folder: Folder for results inside a part.
        tick: Called after each part.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plan: BoardPlan
    text: BoardText
    known: Methods
    kept: ResultCache
    folder: Path
    tick: Tick

    def rows(self) -> list[Row]:
        """Rows of all tasks, as fields of `LeaderboardRow`."""
        rows: list[Row] = []
        for context in self.plan.contexts:
            for task in self.plan.tasks:
                rows += self._recorded(context) if task == "output-error" else self._on_drives(task, context)
        return rows

    def _recorded(self, context: int) -> list[Row]:
        """Rows of output-error at a context length; the layers are recorded unless all trials have been kept."""
        trials, layers = self.plan.on_recorded(context, self.text), list[Layer]()
        passages = Passages(tokens=context - STEPS, steps=STEPS, sequences=self.plan.samples, layers=None)
        keys = {trial: f"output-error {context} {self.plan.samples} {trial}" for trial in trials}
        count = len(layer_numbers(None, self.model.config.get_text_config(decoder=True).num_hidden_layers))
        if any(key not in self.kept for key in keys.values()):
            layers = record_layers(self.model, self.tokenizer, self.text.text, passages, self.tick)
        else:
            self._ticks(self.plan.samples)
        for trial, key in keys.items():
            if key in self.kept:
                self._ticks(count)
            else:
                self.kept.put(key, measured(trial, layers, self.known, self.tick)[0])
        return [self._recorded_row(context, trial, self.kept[key]) for trial, key in keys.items()]

    def _recorded_row(self, context: int, trial: Trial, found: Row) -> Row:
        pairs = np.array([(error, 1.0) for error in found["passages"]])
        low, high = bootstrap(pairs, self.plan.seed)
        shares = found["bytes_useful_share"], found["bytes_fetched_share"]
        score = found["output_rel_error"]
        row = self._row("output-error", context, trial, shares)
        return row | _figures(score, low, high, found["output_rel_error_worst"]) | {"data": self.text.name}

    def _on_drives(self, task: str, context: int) -> list[Row]:
        """Rows of a task whose decode attention runs in drives."""
        plan = self.plan.on_drives(task, context, self.text)
        key = f"{task} {plan}"
        if key in self.kept:
            self._ticks(-(-plan.samples // BATCH) * len(plan.trials()))
        make = partial(measure_accuracy, self.model, self.tokenizer, plan, self.folder, self.tick)
        result = self.kept.get(key, make)
        metric, rows = BOARD_TASKS[task].metric, []
        dense = next(row for row in result["rows"] if row["method"] == "dense" and row["metric"] == metric)
        for trial in plan.shown():
            mine = [row for row in result["rows"] if _is_of(row, trial)]
            whole = next(row for row in mine if row["metric"] == metric)
            groups = [row["value"] for row in mine if row["metric"].startswith(f"{metric}, ")]
            row = self._row(task, context, trial, (whole["bytes_share"], whole["pages_share"]))
            row |= _increase(whole, dense) if task == "perplexity" else _figures_of(whole, groups)
            data = f"{self.text.name}; {whole['rule']}" if BOARD_TASKS[task].reads_text else whole["rule"]
            rows.append(row | {"samples": result["samples"], "data": data})
        return rows

    def _row(self, task: str, context: int, trial: Trial, shares: tuple[float, float]) -> Row:
        """Fields of a row that all tasks have; shares: used and fetched."""
        contender, (used, fetched) = trial.contender, shares
        kv_bytes = placement(self.model).shape.kv_bytes_per_token * context
        return {
            "task": task,
            "method": contender.name,
            "context_tokens": context,
            "samples": self.plan.samples,
            "seed": self.plan.seed,
            "budget": 1 / trial.c,
            "convention": trial.convention,
            "counted_by": "element" if contender.arrays or contender.ideal else "page",
            "bytes_used_share": used,
            "bytes_fetched_share": fetched,
            "bytes_read": round(fetched * kv_bytes),
        }

    def _ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick(None)


def _is_of(row: Row, trial: Trial) -> bool:
    named = row["method"], row["compression"], row["convention"]
    return named == (trial.contender.name, trial.c, trial.convention)


def _figures(score: float, low: float, high: float, worst: float) -> Row:
    """Score, interval and worst value; few samples may give an interval that misses the score by rounding."""
    return {"score": score, "low": min(low, score), "high": max(high, score), "worst": worst}


def _figures_of(whole: Row, groups: list[float]) -> Row:
    """Figures where more is better; the worst is the lowest group, or sample if there are no groups."""
    return _figures(whole["value"], whole["ci_low"], whole["ci_high"], min(groups or whole["sample_values"]))


def _increase(whole: Row, dense: Row) -> Row:
    """Figures of a perplexity minus that of dense attention on the same samples."""
    if "difference" not in whole:
        return _figures(0.0, 0.0, 0.0, 0.0)
    worst = max(mine - theirs for mine, theirs in zip(whole["sample_values"], dense["sample_values"], strict=True))
    figures = whole["difference"], whole["difference_low"], whole["difference_high"]
    return _figures(*figures, max(worst, whole["difference"]))
