"""Results on standard output: whole figures on a narrow terminal, tabs without one.

partner of: vcsd/tables.py, vcsd_cli/shared.py
"""

import io

import pytest
from rich.console import Group
from rich.table import Table

from vcsd.tables import table
from vcsd_cli.shared import Results

FIGURE = "1,310,720,655,360,001"


def rates():
    return table("[b]Rates[/b]", ("system", *(f"figure {number}" for number in range(5))), [("ours", *[FIGURE] * 5)])


def printed(*shown, **given):
    file = io.StringIO()
    Results(file=file, emoji=False, **given).print(*shown)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_of_any_width_shows_whole_figures(width):
    result = printed(rates(), force_terminal=True, width=width, color_system=None)
    assert result.count(FIGURE) == 5
    assert "…" not in result


def test_narrow_terminal_shows_whole_words():
    rows = [("980-pro", word := "sequential_write_direct", "32", each) for each in ("1,000", "1,000,000")]
    made = table("", ("drive", "workload", "depth", "rate"), rows, left=("drive", "workload"))
    assert printed(made, force_terminal=True, width=30, color_system=None).count(word) == 2


def test_without_a_terminal_tables_are_tab_separated():
    assert printed(rates(), "a note").splitlines() == [
        "Rates",
        "\t".join(["system", *(f"figure {number}" for number in range(5))]),
        "\t".join(["ours", *[FIGURE] * 5]),
        "a note",
    ]


def test_without_a_terminal_lines_are_not_wrapped():
    line = "/a/folder" * 40 + ": clean"
    assert printed(line) == line + "\n"


def test_tables_inside_of_a_report_are_tab_separated():
    class Report:
        def __rich__(self):
            return Group("Drives", Group(table("", ("drive", "pages"), [("a", "1")])))

    assert printed(Report()) == "Drives\ndrive\tpages\na\t1\n"


def test_cells_of_several_lines_are_one_line():
    made = Table("what", "why")
    made.add_row("x", "first\nsecond")
    assert printed(made).splitlines()[1] == "x\tfirst second"
