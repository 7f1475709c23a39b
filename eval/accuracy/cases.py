"""Methods on adversarial scenarios: the worst rows, and dense attention compared with float64."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attention_engine import METHODS, Methods, load_methods
from vcsd.options import MAX_SEED, MethodsFile
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.accuracy.compared_methods import Trial, contenders, trials
from vcsd_eval.accuracy.errors import Row, measured
from vcsd_eval.accuracy.scenarios import SCENARIOS, scenario
from vcsd_eval.accuracy.selectors import chosen
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import numbers

WORST = 12  # rows that are shown


def bench_cases(
    tried: list[Trial], tokens: int, steps: int, seed: int, methods: Methods = METHODS, tick: Tick = no_tick
) -> list[Row]:
    """A row for each trial on each scenario, columns as `measured` has them, with the scenario's name and shape."""
    rows = []
    for name, (_, G, d) in SCENARIOS.items():
        layer = scenario(name, tokens, steps, seed)
        for trial in tried:
            row, _ = measured(trial, [layer], methods, tick)
            rows.append({"scenario": name, "queries_per_kv_head": G, "head_dim": d} | row)
    return rows


def experiment(
    tokens: Annotated[int, typer.Option(min=256, max=1 << 15, help="prompt length, tokens")] = 1024,
    steps: Annotated[int, typer.Option(min=1, max=64, help="number of decode steps")] = 2,
    method: Annotated[str | None, typer.Option(help="comma-separated methods (default: all)")] = None,
    compression: Annotated[
        str, typer.Option(help="comma-separated values C of the budget 1/C, bytes convention")
    ] = "8",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of the rows")] = 0,
    methods: MethodsFile = None,
) -> Outcome:
    """Run every method on adversarial scenarios: sinks, biases, scattered tokens, flat and peaky attention, ..."""
    known = load_methods(methods)
    tried = trials(chosen(method, contenders(known)), numbers("compression", compression, float))
    with progress("scenarios x methods", len(SCENARIOS) * len(tried)) as tick:
        rows = bench_cases(tried, tokens, steps, seed, known, tick)
    worst = sorted(rows, key=lambda row: -row["output_rel_error"])
    reference = [row for row in rows if row["name"] == "dense"]
    result = {
        "tokens": tokens,
        "steps": steps,
        "seed": seed,
        "scenarios": list(SCENARIOS),
        "rows": rows,
        "worst": [{name: row[name] for name in ("scenario", "name", "output_rel_error")} for row in worst[:WORST]],
        "reference_worst_error": max((row["output_rel_error_worst"] for row in reference), default=None),
    }
    return Outcome(result, [_shown(rows), _worst(worst[:WORST])])


def _shown(rows: list[Row]) -> Any:
    """A table of the mean error by method and scenario; a star marks rows beyond their budgets."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    dense = {each.name for each in contenders() if each.dense}
    for row in rows:
        budget = "-" if row["name"] in dense else f"{row['budget']:.3f}"
        mark = "" if row["within_budget"] else "*"
        line = cells.setdefault((row["name"], row["convention"], budget), {})
        line[row["scenario"]] = f"{row['output_rel_error']:.2g}{mark}"
    lines = []
    for (name, convention, budget), line in cells.items():
        label = name if convention == "bytes" else f"{name} ({convention})"
        lines.append((label, budget, *(line[scenario] for scenario in SCENARIOS)))
    return table("Relative error of the output; *: more bytes than its budget", ("method", "budget", *SCENARIOS), lines)


def _worst(rows: list[Row]) -> Any:
    cells = [(row["scenario"], row["name"], f"{row['budget']:.3f}", f"{row['output_rel_error']:.2f}") for row in rows]
    return table("Worst rows", ("scenario", "method", "budget", "error"), cells, ("scenario", "method"))
