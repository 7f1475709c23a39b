"""The leaderboard's command: a run or recorded results, submissions of others, tables and files."""

from __future__ import annotations

import datetime
import hashlib
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vcsd
from attention_engine import METHODS, Methods, load_methods
from vcsd.options import MAX_SEED, MethodsFile, ModelFolder
from vcsd.progress import note, progress, status
from vcsd_eval.accuracy import texts
from vcsd_eval.accuracy.accuracy import BudgetConvention, Compressions
from vcsd_eval.accuracy.leaderboard.board_tasks import board_tasks
from vcsd_eval.accuracy.leaderboard.ranking import board_entries, rank_groups
from vcsd_eval.accuracy.leaderboard.render import PLACE, group_values, markdown, terminal_tables
from vcsd_eval.accuracy.leaderboard.submission import (
    LeaderboardRow,
    Submission,
    SubmittedMethod,
    machine_name,
    read_submission,
    submission_json,
)
from vcsd_eval.doc_tables import with_table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import Drives, numbers
from vcsd_eval.partial_results import ResultCache

if TYPE_CHECKING:
    from vcsd_eval.accuracy.leaderboard.board_run import BoardPlan, BoardText

BUNDLED = "bundled checkpoint"
OPTION_NAMES = {"convention": "--budget-convention", "methods": "--methods-file"}  # unlike their fields


@dataclass(frozen=True, slots=True)
class BoardSamples:
    """Tasks and samples of a run."""

    task: Annotated[str, typer.Option(help="comma-separated tasks, see docs/leaderboard.md")] = (
        "output-error,perplexity,niah-single"
    )
    contexts: Annotated[
        str, typer.Option(help="comma-separated lengths of a sample, up to the model's context, tokens")
    ] = "2048"
    samples: Annotated[
        int, typer.Option(min=2, max=1 << 20, help="number of samples of a task at a length; passages of output-error")
    ] = 8
    text: texts.SourceText = None
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of samples and confidence intervals")] = 0


@dataclass(frozen=True, slots=True)
class BoardMethods:
    """Methods and budgets of a run."""

    method: Annotated[
        str,
        typer.Option(help="comma-separated methods; those on arrays take part in output-error, ours has its budget"),
    ] = "dense,sparf,h2o,quest,ours,progressive,rabitq,snapkv,retroinfer"
    compression: Compressions = "4,8"
    convention: BudgetConvention = "bytes"
    methods: MethodsFile = None


@dataclass(frozen=True, slots=True)
class BoardFiles:
    """Files of results."""

    recorded: Annotated[
        list[Path] | None,
        typer.Option(help="results of an earlier run (JSON), shown in place of a new run; may be repeated"),
    ] = None
    add: Annotated[
        list[Path] | None, typer.Option(help="submission of others (JSON) that joins the tables; may be repeated")
    ] = None
    submission_out: Annotated[Path | None, typer.Option(help="JSON file for the rows of this run, to be submitted")] = (
        None
    )
    submitter: Annotated[str, typer.Option(help="person or organization in the submission")] = "anonymous"
    markdown_out: Annotated[Path | None, typer.Option(help="Markdown file that has a place for the tables")] = None


def experiment(
    given: BoardSamples,
    field: BoardMethods,
    files: BoardFiles,
    model: ModelFolder = None,
    drives: Drives = 2,
    progress_dir: Annotated[
        Path, typer.Option("--checkpoint-dir", help="folder for intermediate results, used to continue a killed run")
    ] = Path("build/leaderboard"),
) -> Outcome:
    """Rank methods by task, context length and bytes read, with the submissions of others."""
    if files.recorded and files.submission_out:
        raise ValueError("--submission-out writes the rows of a run: leave out --recorded")
    defaults = (BoardSamples(), BoardMethods(), BoardFiles().submitter, None, 2)
    if files.recorded and (given, field, files.submitter, model, drives) != defaults:
        raise ValueError("--recorded shows an earlier run: leave out the options of a run, such as --task and --model")
    submitted = [read_submission(path) for path in files.add or []]
    for path in filter(None, (files.submission_out, files.markdown_out)):
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise ValueError(f"{path}: must be a file in a folder that exists")
    page = ""
    if files.markdown_out:
        try:
            page = files.markdown_out.read_text(encoding="utf-8")
            with_table(page, PLACE, "")
        except ValueError as error:
            raise ValueError(f"{files.markdown_out}: {error}") from None
    runs = [read_submission(path) for path in files.recorded or []]
    if not runs:
        runs = [_measured(given, field, files.submitter, model, drives, progress_dir)]
    if files.submission_out:
        files.submission_out.write_text(submission_json(runs[0]), encoding="utf-8")
    entries = board_entries(runs, submitted)
    groups = rank_groups(entries)
    if files.markdown_out:
        files.markdown_out.write_text(with_table(page, PLACE, markdown(groups, entries)), encoding="utf-8")
    about = ("submitter", "date", "command", "vcsd_version", "model", "machine")
    result: dict[str, Any] = {"runs": [{name: getattr(run, name) for name in about} for run in [*runs, *submitted]]}
    rows = [{"origin": each.origin, "model": each.run.model} | asdict(each.row) for each in entries]
    notes = ["a rank counts rows that are better by 95 % intervals without overlap, = marks ties: docs/leaderboard.md"]
    result |= {"rows": rows, "groups": [group_values(group) for group in groups]}
    return Outcome(result, terminal_tables(groups), notes)


def _measured(
    given: BoardSamples, field: BoardMethods, submitter: str, model: Path | None, drives: int, folder: Path
) -> Submission:
    """Measure all methods; raises ValueError for invalid options before the model is run."""
    known, contexts = load_methods(field.methods), numbers("contexts", given.contexts)
    from vcsd_eval.accuracy.compared_methods import contenders
    from vcsd_eval.accuracy.leaderboard.board_run import BoardPlan
    from vcsd_eval.accuracy.selectors import chosen

    plan = BoardPlan(
        tasks=tuple(board_tasks(given.task)),
        contexts=tuple(sorted(set(contexts))),
        methods=tuple(chosen(_with_dense(field.method), contenders(known))),
        compressions=tuple(dict.fromkeys(numbers("compression", field.compression, float))),
        convention=field.convention,
        samples=given.samples,
        drives=drives,
        seed=given.seed,
        own_methods=field.methods,
    )
    rows, kept = run_board(plan, model, given.text, known, folder)
    names = dict.fromkeys(row.method for row in rows)
    made = Submission(
        version=1,
        submitter=submitter,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=_command(given, field, model, drives),
        vcsd_version=vcsd.__version__,
        model=model.name if model else BUNDLED,
        machine=machine_name(),
        methods=tuple(SubmittedMethod(name=name, source=_source(plan, name)) for name in names),
        rows=tuple(rows),
    )
    kept.close()
    return made


def run_board(
    plan: BoardPlan, model: Path | None, text: Path | None, known: Methods, folder: Path
) -> tuple[list[LeaderboardRow], ResultCache]:
    """Rows of a run, which continues one that was killed, and its kept results, to be closed when the rows are used."""
    from host_driver.hf.shape import placement
    from host_driver.sharding import assign_heads
    from vcsd.loading import CHECKPOINT, load
    from vcsd_eval.accuracy.leaderboard.board_run import BoardRun, check_run, parts_of
    from vcsd_eval.accuracy.selectors import kept_results

    written = _board_text(text, folder)
    with status("loading the model"):
        loaded, tokenizer = load(model or CHECKPOINT)
        assign_heads(placement(loaded).shape, plan.drives)
        check_run(plan, loaded, tokenizer, written)
    kept = kept_results(folder, [written.name, plan.drives, plan.seed], model or CHECKPOINT, plan.own_methods)
    with progress("parts", parts_of(plan, loaded, written)) as tick:
        rows = BoardRun(loaded, tokenizer, plan, written, known, kept, folder / "parts", tick).rows()
    possible = [row for row in rows if max(row["bytes_used_share"], row["bytes_fetched_share"]) <= 1]
    for row in (row for row in rows if row not in possible):
        note(f"{row['method']} at {row['budget']:.3g}, {row['task']}: left out, reads more bytes than the KV data has")
    return [LeaderboardRow(**row) for row in possible], kept


def _board_text(text: Path | None, folder: Path) -> BoardText:
    """The text of the samples, also as a file whose name depends on its content."""
    from vcsd_eval.accuracy.leaderboard.board_run import BoardText
    from vcsd_eval.accuracy.recorded import TEXT

    written = texts.read(text)
    digest = hashlib.sha256(written.encode()).hexdigest()[:12]
    path = folder / f"text-{digest}.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(written, encoding="utf-8")
    return BoardText(f"{Path(text or TEXT).name}, SHA-256 {digest}", written, path)


def _with_dense(methods: str) -> str:
    """Names of methods, dense attention first."""
    return ",".join(dict.fromkeys(["dense", *methods.split(",")]))


def _source(plan: BoardPlan, name: str) -> str:
    """Where a method of a run can be read."""
    (contender,) = (each for each in plan.methods if each.name == name)
    if contender.arrays:
        return "docs/published-methods.md"
    return "docs/methods.md" if contender.method in METHODS or not plan.own_methods else plan.own_methods.name


def _command(given: BoardSamples, field: BoardMethods, model: Path | None, drives: int) -> str:
    """The command line that repeats a run; folders of this machine are left out."""
    options: dict[str, tuple[object, object]] = {"--model": (model and model.name, None), "--drives": (drives, 2)}
    for group, default in ((given, BoardSamples()), (field, BoardMethods())):
        for each in fields(group):
            value = getattr(group, each.name)
            value = value.name if isinstance(value, Path) else value
            options[OPTION_NAMES.get(each.name, f"--{each.name}")] = value, getattr(default, each.name)
    words = [word for name, (value, default) in options.items() if value != default for word in (name, str(value))]
    return shlex.join(["vcsd", "eval", "leaderboard", *words])
