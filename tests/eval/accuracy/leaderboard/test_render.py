"""Tables of the leaderboard, and the page of docs/, which is what the recorded results give."""

import re
from itertools import pairwise
from pathlib import Path

from tests.eval.accuracy.leaderboard.submissions import row, submission
from vcsd.tables import tab_separated
from vcsd_eval.accuracy.leaderboard.ranking import board_entries, rank_groups
from vcsd_eval.accuracy.leaderboard.render import (
    COLUMNS,
    PLACE,
    group_values,
    markdown,
    terminal_tables,
)
from vcsd_eval.accuracy.leaderboard.submission import read_submission
from vcsd_eval.doc_tables import with_table

DOCS = Path(__file__).parents[4] / "docs"


def rendered(measured, submitted=()):
    entries = board_entries(measured, submitted)
    return markdown(rank_groups(entries), entries)


def test_page_of_docs_equals_its_render():
    """On a difference: run the command that the page names."""
    page = (DOCS / "leaderboard.md").read_text()
    words = re.search(r"^vcsd eval leaderboard (--recorded .*)$", page.replace("\\\n", ""), re.MULTILINE)[1].split()
    recorded = [word for before, word in pairwise(words) if before == "--recorded"]
    assert sorted(recorded) == sorted(
        f"docs/{path.name}" for path in DOCS.glob("leaderboard*.json") if "schema" not in path.name
    )
    runs = [read_submission(DOCS.parent / path) for path in recorded]
    sent = [read_submission(path) for path in sorted((DOCS / "submissions").glob("*.json"))]
    assert page == with_table(page, PLACE, rendered(runs, sent))


def test_tables_have_all_columns_of_a_row():
    group = rank_groups(board_entries([submission(row("a"), row("dense", bytes_fetched_share=1.0))], []))[0]
    title, columns, *rows = tab_separated(terminal_tables([group])[0]).split("\n")
    assert title.startswith("tiny, 1,024 tokens, output-error: relative error of the attention output, lower is better")
    assert title.endswith("largest error of a query head in one step; dense attention: 0.1")
    assert tuple(columns.split("\t")) == COLUMNS
    assert [line.split("\t")[:5] for line in rows] == [
        ["1/4", "1", "a", "0.25", "0.100"],
        ["all", "1 =", "a", "0.25", "0.100"],
        ["all", "1 =", "dense", "0.25", "0.100"],
    ]
    assert [each["rank"] for each in group_values(group)["ranks"]] == [1, 1, 1]


def test_submitted_text_has_no_meaning_on_a_terminal():
    made = submission(row("[/]"), submitter="[red]Bob")
    (shown,) = terminal_tables(rank_groups(board_entries([], [made])))
    assert "\t[/]\t" in tab_separated(shown) and "submitted by [red]Bob" in tab_separated(shown)


def test_submitted_text_has_no_meaning_in_markdown():
    name = "<script>|[x](y)"
    text = rendered([submission(row("a"))], [submission(row(name), submitter="*Bob*", command="a `b` | c")])
    assert "<script>" not in text
    assert r"&lt;script&gt;\|\[x\](y)" in text
    assert r"submitted by \*Bob\*" in text
    assert r"`a b \| c`" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3, 8, 14}


def test_only_plain_links_become_links():
    made = submission(row("a"))
    (method,) = made.methods
    assert "| a | <https://example.com/a> |" in rendered([made])
    bad = submission(row("a"), methods=(type(method)(name="a", source="javascript:alert(1)"),))
    assert "| a | javascript:alert(1) |" in rendered([bad])
