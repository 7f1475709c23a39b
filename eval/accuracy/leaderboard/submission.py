"""Results of the leaderboard as JSON: the rows of one run, who made it, and with what. The schema is in docs/."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from csd_spec.checked import adapter, from_json, frozen_value
from csd_spec.sparf import BudgetConvention
from vcsd_eval.accuracy.leaderboard.board_tasks import BOARD_TASKS, TaskName
from vcsd_eval.doc_tables import cpu_name

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MAX_FILE_BYTES = 16 << 20
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]*$"  # no control characters, C1 and bidirectional too
Line = Annotated[str, Field(min_length=1, max_length=300, pattern=PRINTABLE)]
Share = Annotated[float, Field(ge=0, le=1)]
CountedBy = Literal["page", "element"]


@frozen_value
class SubmittedMethod:
    """A method and where it can be read.

    Attributes:
        name: Name of the method in the rows.
        source: Link to its code or paper, or a file of this repository.
    """

    name: Line
    source: Line


@frozen_value
class LeaderboardRow:
    """Score of one method on one task, at one context length and one budget.

    Attributes:
        task: Name of the task.
        method: Name of the method, one of `methods`.
        context_tokens: Length of a sample, tokens.
        samples: Number of samples; passages for output-error.
        seed: Random seed of the samples and of the bootstrap.
        data: Data of the samples: the text and the beginning of its SHA-256, or the rule that makes them.
        budget: Budget of the method as a fraction of the KV data in FP16; 1 for a method without a budget.
        convention: Meaning of the budget: bytes that are used, or the share of selected tokens (paper).
        counted_by: Unit in which read bytes are counted: whole flash pages, or single elements (no drive does this).
        bytes_used_share: Bytes that pass the filter, as a fraction of the KV data in FP16.
        bytes_fetched_share: Bytes that are read, as a fraction of the same; this is what limits a method.
        bytes_read: Bytes that a decode step of one sequence reads at this context, all layers.
        score: The figure of the task.
        low, high: 95 % interval of the score.
        worst: Worst value of the task's parts.
    """

    task: TaskName
    method: Line
    context_tokens: Annotated[int, Field(ge=64, le=1 << 20)]
    samples: Annotated[int, Field(ge=1, le=1 << 20)]
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)]
    data: Line
    budget: Annotated[float, Field(gt=0, le=1)]
    convention: BudgetConvention
    counted_by: CountedBy
    bytes_used_share: Share
    bytes_fetched_share: Share
    bytes_read: Annotated[int, Field(ge=0, le=1 << 50)]
    score: float
    low: float
    high: float
    worst: float

    def __post_init__(self) -> None:
        task = BOARD_TASKS[self.task]
        for name in ("score", "low", "high", "worst"):
            if not task.is_possible(getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name):g}: {self.task} has {_range(task.least, task.most)}")
        if not self.low <= self.score <= self.high:
            raise ValueError(f"score = {self.score:g}: must be from low = {self.low:g} to high = {self.high:g}")
        if task.is_better(self.worst, self.score):
            raise ValueError(f"worst = {self.worst:g}: is better than score = {self.score:g}; give the {task.worst}")
        if (self.bytes_read == 0) != (self.bytes_fetched_share == 0):
            raise ValueError(f"bytes_read = {self.bytes_read}: contradicts bytes_fetched_share")

    @property
    def label(self) -> str:
        """Name in tables: the method's, and the convention of its budget unless that is bytes."""
        return self.method if self.convention == "bytes" else f"{self.method} ({self.convention})"


@frozen_value
class Submission:
    """Results of one run of the leaderboard.

    Attributes:
        version: Version of this format.
        submitter: Person or organization that ran it.
        date: Day of the run, YYYY-MM-DD.
        command: Command that made the rows.
        vcsd_version: Version of vcsd.
        model: Name of the model.
        machine: CPU, cores and memory.
        methods: Methods of the rows.
        rows: Scores.
    """

    version: Literal[1]
    submitter: Line
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    command: Annotated[str, Field(min_length=1, max_length=2000, pattern=PRINTABLE)]
    vcsd_version: Line
    model: Line
    machine: Line
    methods: Annotated[tuple[SubmittedMethod, ...], Field(min_length=1, max_length=1000)]
    rows: Annotated[tuple[LeaderboardRow, ...], Field(min_length=1, max_length=100_000)]

    def __post_init__(self) -> None:
        try:
            date.fromisoformat(self.date)
        except ValueError as error:
            raise ValueError(f"date = {self.date}: {error}; give the day of the run as YYYY-MM-DD") from error
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError("methods: two have the same name; give each one name")
        seen = set()
        for number, row in enumerate(self.rows):
            if row.method not in names:
                raise ValueError(f"rows[{number}].method = {row.method!r}: is not in methods; add it with its source")
            budget = row.budget, row.convention, row.counted_by
            key = (row.task, row.method, row.context_tokens, budget, row.data, row.seed)
            if key in seen:
                raise ValueError(f"rows[{number}]: {row.task} of {row.label} has this budget twice; keep one row")
            seen.add(key)


def _range(least: float | None, most: float | None) -> str:
    return f"scores of at least {least:g}" if most is None else f"scores from {least:g} to {most:g}"


def read_submission(path: Path) -> Submission:
    """Read and validate a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a submission; the message names the field and what to do.
    """
    if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; split the rows over several files")
    try:
        text = path.read_text(encoding="utf-8")
        return from_json(text, Submission)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}; docs/leaderboard.schema.json has the format") from error


def submission_json(submission: Submission) -> str:
    """Text of a file that `read_submission` reads; a line for each row."""
    values = asdict(submission)
    lists = {name: values.pop(name) for name in ("methods", "rows")}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    for name, items in lists.items():
        lines.append(f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(item)}" for item in items) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def submission_schema() -> dict[str, Any]:
    """JSON Schema of a file."""
    return {"$schema": DIALECT, **adapter(Submission).json_schema()}


def machine_name() -> str:
    """CPU, cores and memory of this machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{cpu_name()}, {memory_bytes / (1 << 30):.0f} GiB"
