"""The command: a run that is written, shown again and joined by submissions; invalid input is one line."""

import json

import pytest

from tests.eval.accuracy.leaderboard.submissions import row, submission
from tests.vcsd_cli.test_main import vcsd
from vcsd_eval.accuracy.leaderboard.leaderboard import BUNDLED
from vcsd_eval.accuracy.leaderboard.submission import read_submission, submission_json

BOARD = ("eval", "leaderboard")
SMALL = ("--task", "output-error", "--contexts", "256", "--samples", "2", "--compression", "4")
OWN = "from attention_engine import METHODS\n\nMETHODS = {**METHODS, 'mine': METHODS['local']}\n"


@pytest.fixture(autouse=True)
def in_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_run_is_written_and_joined_by_submission(capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    words = ("--method", "mine,keydiff", "--methods-file", "mine.py", "--submission-out", "run.json")
    code, out, err = vcsd(capsys, monkeypatch, *BOARD, *SMALL, *words, "--submitter", "Ann", "-o", "json")
    assert code == 0, err
    result, made = json.loads(out), read_submission(tmp_path / "run.json")
    assert [each["method"] for each in result["rows"]] == ["dense", "mine", "keydiff"]
    assert (made.submitter, made.model, made.rows[0].data[:12]) == ("Ann", BUNDLED, "passage.txt,")
    assert {each.name: each.source for each in made.methods} == {
        "dense": "docs/methods.md",
        "mine": "mine.py",
        "keydiff": "docs/published-methods.md",
    }
    assert made.command == (
        "vcsd eval leaderboard --task output-error --contexts 256 --samples 2 --method mine,keydiff --compression 4"
        " --methods-file mine.py"
    )
    assert not list((tmp_path / "build/leaderboard").glob("*.jsonl"))
    other = made.rows[1]
    sent = submission(row("new", data=other.data, context_tokens=256, samples=2), model=BUNDLED, submitter="Bob")
    (tmp_path / "sent.json").write_text(submission_json(sent))
    (tmp_path / "page.md").write_text("# Page\n<!-- table: leaderboard -->\n<!-- /table -->\n")
    words = ("--recorded", "run.json", "--add", "sent.json", "--markdown-out", "page.md")
    code, out, err = vcsd(capsys, monkeypatch, *BOARD, *words)
    assert code == 0, err
    assert "submitted by Bob\t2 samples give too narrow an interval; not measured here: two cores, vcsd 0.2.0" in out
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Page\n<!-- table: leaderboard -->\n\n### Runs\n")
    assert "submitted, not measured here | Bob" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--task", "chess"), "--task 'chess': must be one of output-error"),
        (("--method", "fastest"), "--method 'fastest': must be one of"),
        (("--contexts", "-5"), "--contexts '-5': each must be at least 1"),
        (("--contexts", "x"), "--contexts 'x': needs numbers"),
        (("--contexts", "9000"), "--contexts 9000: must be from 128 to the model's context of 4096 tokens"),
        (("--compression", "0.5"), "--compression '0.5': each must be at least 1"),
        (("--text", "none.txt"), "none.txt: No such file"),
        (("--text", "short.txt"), "the text short.txt, SHA-256"),
        (("--drives", "9"), "--drives 9: the model has 4 KV heads"),
        (("--add", "none.json"), "none.json: No such file"),
        (("--add", "short.txt"), "short.txt: not JSON, or cut off"),
        (("--recorded", "short.txt"), "short.txt: not JSON, or cut off"),
        (("--recorded", "short.txt", "--submission-out", "x.json"), "leave out --recorded"),
        (("--recorded", "short.txt", "--task", "passkey"), "leave out the options of a run"),
        (("--recorded", "short.txt", "--drives", "3"), "leave out the options of a run"),
        (("--submission-out", "none/x.json"), "none/x.json: must be a file in a folder that exists"),
        (("--markdown-out", "short.txt"), "short.txt: the page needs one line `<!-- table: leaderboard -->`"),
    ],
)
def test_invalid_input_is_one_line_error(capsys, monkeypatch, tmp_path, words, says):
    (tmp_path / "short.txt").write_text("short")
    code, out, err = vcsd(capsys, monkeypatch, *BOARD, *words)
    assert code and not out
    (line,) = err.splitlines()
    assert line.startswith("vcsd: ")
    assert says in line
