"""Submissions: what is written can be read, impossible numbers are refused, the schema is that of docs/."""

import json
from pathlib import Path

import pytest

from tests.eval.accuracy.leaderboard.submissions import row, submission
from vcsd_eval.accuracy.leaderboard.submission import (
    DIALECT,
    machine_name,
    read_submission,
    submission_json,
    submission_schema,
)
from vcsd_eval.doc_tables import cpu_name

SCHEMA = Path(__file__).parents[4] / "docs" / "leaderboard.schema.json"


def test_schema_of_docs_is_that_of_the_program():
    """On a difference: write `submission_schema()` to the file, with indent 1."""
    assert SCHEMA.read_text() == json.dumps(submission_schema(), indent=1) + "\n"
    assert submission_schema()["$schema"] == DIALECT


def test_written_submission_is_read_unchanged(tmp_path):
    made = submission(row(), row("slow", score=0.3))
    (tmp_path / "made.json").write_text(submission_json(made))
    assert read_submission(tmp_path / "made.json") == made


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score": float("nan")}, "rows[0].score: must be a finite number"),
        ({"high": float("inf")}, "rows[0].high: must be a finite number"),
        ({"bytes_read": -1}, "rows[0].bytes_read: must be greater than or equal to 0"),
        ({"bytes_read": 0}, "bytes_read = 0: contradicts bytes_fetched_share"),
        ({"bytes_fetched_share": 1.01}, "rows[0].bytes_fetched_share: must be less than or equal to 1"),
        ({"budget": 0.0}, "rows[0].budget: must be greater than 0"),
        ({"task": "chess"}, "rows[0].task: must be 'output-error', 'perplexity'"),
        ({"task": "passkey", "high": 1.5}, "high = 1.5: passkey has scores from 0 to 1"),
        ({"low": -0.1}, "low = -0.1: output-error has scores of at least 0"),
        ({"low": 0.2, "high": 0.3}, "score = 0.1: must be from low = 0.2 to high = 0.3"),
        ({"worst": 0.05}, "worst = 0.05: is better than score = 0.1; give the largest error of a query head"),
        ({"method": "other"}, "rows[0].method = 'other': is not in methods; add it with its source"),
        ({"samples": True}, "rows[0].samples: must be a valid integer"),
        ({"colour": 1}, "rows[0].colour: no such field"),
        ({"data": "a\nb"}, "rows[0].data: String should match pattern"),
    ],
)
def test_impossible_row_is_one_line_error(tmp_path, changes, says):
    values = json.loads(submission_json(submission(row())))
    values["rows"][0] |= changes
    file = tmp_path / "sent.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError) as error:
        read_submission(file)
    text = str(error.value)
    assert text.startswith(f"{file}: ")
    assert says in text
    assert text.endswith("docs/leaderboard.schema.json has the format")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON, or cut off"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[]", "must be"),
        (b"{}", "version: is missing"),
        (b"[" * 100_000, "not JSON, or cut off"),
    ],
)
def test_broken_file_is_refused(tmp_path, content, says):
    file = tmp_path / "sent.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_submission(file)


def test_large_and_missing_files_are_refused(tmp_path):
    file = tmp_path / "sent.json"
    with file.open("wb") as large:
        large.truncate((16 << 20) + 1)
    with pytest.raises(ValueError, match="larger than 16 MiB"):
        read_submission(file)
    with pytest.raises(FileNotFoundError):
        read_submission(tmp_path / "none.json")


def test_rows_and_methods_are_unique():
    with pytest.raises(ValueError, match=r"rows\[1\]: output-error of fast has this budget twice"):
        submission(row(), row(score=0.2))
    made = submission(row())
    with pytest.raises(ValueError, match="methods: two have the same name"):
        submission(row(), methods=made.methods * 2)
    with pytest.raises(ValueError, match="date: String should match pattern"):
        submission(row(), date="26.11.2026")
    with pytest.raises(ValueError, match=r"date = 2026-13-01: .*; give the day of the run as YYYY-MM-DD"):
        submission(row(), date="2026-13-01")
    with pytest.raises(ValueError, match="submitter: String should match pattern"):
        submission(row(), submitter="\x9b2J")


def test_machine_has_cores_and_memory():
    assert machine_name().startswith(f"{cpu_name()}, ") and machine_name().endswith(" GiB")
