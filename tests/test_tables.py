"""Tables of the documentation are those of their recorded results, and short simulated ones are run again.

`docs/_tables/tables.py` is the command.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.compare_revisions import differences

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "_tables" / "tables.py"


def module():
    spec = importlib.util.spec_from_file_location("doc_tables", FILE)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["doc_tables"] = loaded  # where pydantic looks up types
    spec.loader.exec_module(loaded)
    return loaded


TABLES = module()
LONGEST_S = 5.0  # of a command that is run again here
RECORDED = {name: TABLES.read_recorded(name) for name in TABLES.names()}


def short_runs():
    """Simulated runs that take little time, each command once."""
    runs = {}
    for name in TABLES.names():
        for run, known in RECORDED[name].items():
            if known.seconds <= LONGEST_S and not TABLES.load(name).runs[run].measured:
                runs.setdefault(known.command, (name, run))
    return list(runs.values())


@pytest.mark.parametrize("name", TABLES.names())
def test_page_has_tables_as_recorded(name):
    tables = TABLES.load(name)
    page = (ROOT / tables.page).read_text()
    assert TABLES.with_tables(page, TABLES.render(tables, RECORDED[name])) == page


def test_every_place_in_docs_has_its_table():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    places = [line for page in pages for line in page.read_text().splitlines() if line.startswith("<!-- table: ")]
    names = [table for name in TABLES.names() for table in TABLES.load(name).tables]
    names.append("architectures")  # made from the result of its test
    assert sorted(places) == [f"<!-- table: {name} -->" for name in sorted(names)]


@pytest.mark.parametrize("name", TABLES.names())
def test_recorded_has_no_other_runs(name):
    assert list(RECORDED[name]) == list(TABLES.load(name).runs)


def test_each_file_of_values_has_its_tables():
    with_runs = [name for name in TABLES.names() if TABLES.load(name).runs]
    assert sorted(path.stem for path in TABLES.FOLDER.glob("*.json")) == with_runs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "run"), short_runs(), ids=lambda part: part)
def test_short_simulated_run_gives_recorded_values(request, name, run):
    declared = TABLES.load(name).runs[run]
    if "$VCSD_DATA" in declared.command:
        request.getfixturevalue("data_dir")
    result = TABLES.evaluate(declared, TABLES.execute(declared))
    assert list(differences(RECORDED[name][run].values, result, within=1e-9)) == []  # CPUs round differently


MADE = """\
page: page.md
runs:
  errors:
    command: python tell.py
    values: {worst: rows | map(attribute="error") | max, share: "rows[0].error / n"}
tables:
  made: |
    | worst | share |
    |---|---|
    | {{ errors.worst | f(".1f") }} | {{ errors.share | f(".3f") }} |
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder with tables `made` of one table, and a page for it."""
    monkeypatch.setattr(TABLES, "FOLDER", tmp_path)
    monkeypatch.setattr(TABLES, "ROOT", tmp_path)
    result = {"rows": [{"id": "a", "error": 2.5}, {"id": "b", "error": 7.25}], "n": 2}
    (tmp_path / "tell.py").write_text(f"import json\nprint(json.dumps({result}))\n")
    (tmp_path / "made.yaml").write_text(MADE)
    (tmp_path / "page.md").write_text("# Page\n\n<!-- table: made -->\n<!-- /table -->\n\nEnd.\n")
    return tmp_path


def run_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["tables", *words])
    TABLES.main()


def test_command_writes_values_into_page(made, monkeypatch):
    run_command(monkeypatch)
    page = (made / "page.md").read_text()
    assert "\n| 7.2 | 1.250 |\n\n<!-- /table -->\n\nEnd.\n" in page
    run_command(monkeypatch, "made", "--missing")
    assert (made / "page.md").read_text() == page


def test_rows_are_chosen_by_values():
    rows = [{"id": "a", "n": 1, "more": 0}, {"id": "b", "n": 2, "more": 0}]
    assert TABLES.where(rows, more=0) == rows and TABLES.where(rows, id="c") == []
    assert TABLES.columns(rows, "id", "n") == [{"id": "a", "n": 1}, {"id": "b", "n": 2}]
    assert TABLES.only(rows, id="b", n=2) is rows[1]
    with pytest.raises(ValueError, match="2 rows have"):
        TABLES.only(rows, more=0)


def test_dates_are_first_and_last_day():
    runs = {name: {"command": "c", "values": {}} for name in "ab"}
    tables = TABLES.Tables(page="page.md", runs=runs, tables={"one": "{{ dates }}"})
    known = {"command": "c", "cpu": "", "seconds": 1, "expressions": {}, "values": {}}
    one, other = (TABLES.Recorded(date=f"2026-01-0{day}", **known) for day in (3, 1))
    assert TABLES.render(tables, {"a": one, "b": other}) == {"one": "2026-01-01 to 2026-01-03"}
    assert TABLES.render(tables, {"a": one, "b": one}) == {"one": "2026-01-03"}


def test_missing_runs_nothing_that_is_recorded(made, monkeypatch):
    run_command(monkeypatch)
    monkeypatch.setattr(TABLES, "execute", lambda run: pytest.fail("it ran again"))
    run_command(monkeypatch, "--missing")


def test_measured_runs_again_what_depends_on_machine(made, monkeypatch):
    run_command(monkeypatch)
    ran = []
    monkeypatch.setattr(TABLES, "execute", lambda run: ran.append(run.command) or {"rows": [{"error": 1}], "n": 1})
    run_command(monkeypatch, "--measured")
    assert ran == []
    table = made / "made.yaml"
    table.write_text(table.read_text().replace("python tell.py", "python tell.py\n    measured: true"))
    run_command(monkeypatch, "--measured")
    assert ran == ["python tell.py"]


def test_changed_expression_is_run_again(made, monkeypatch):
    run_command(monkeypatch)
    table = made / "made.yaml"
    table.write_text(table.read_text().replace("rows[0].error", "rows[1].error"))
    assert list(TABLES.missing(TABLES.load("made"), TABLES.read_recorded("made"))) == ["errors"]
    run_command(monkeypatch, "--missing")
    assert "| 7.2 | 3.625 |" in (made / "page.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows[0].error", "rows[9].error", "has no element 9"),
        ("errors.share", "errors.shares", "no attribute 'shares'"),
        ("rows[0].error / n", "rows | columns('id', 'eror')", "columns.*'eror'"),
        ("rows[0].error / n", "(rows | only(id='c')).error", "0 rows have {'id': 'c'}: must be one"),
        ("rows[0].error", "rows[0", "unexpected end"),
        ("python tell.py", "python -c exit(3)", "exit code 3"),
        ("python tell.py", "echo", "its output is not JSON"),
        ("python tell.py", "python tell.py\n    before: exit 4", "exit 4: exit code 4"),
        ("page: page.md", "page: none.md", "none.md: .*No such file"),
        ("page: page.md", "page: page.md\nmore: 1", "Extra inputs"),
    ],
)
def test_wrong_table_is_refused_with_reason(made, monkeypatch, old, new, message):
    table = made / "made.yaml"
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(SystemExit, match=message):
        run_command(monkeypatch)


def test_runs_of_other_files_are_used(made, monkeypatch):
    (made / "two.md").write_text("<!-- table: two -->\n<!-- /table -->\n")
    text = 'page: two.md\nuses: [made]\ntables: {two: "{{ other.made.errors.worst }}"}\n'
    (made / "two.yaml").write_text(text)
    run_command(monkeypatch, "made")
    assert "\n7.25\n" in (made / "two.md").read_text()
    (made / "two.yaml").write_text(text.replace("errors", "others"))
    with pytest.raises(SystemExit, match="no attribute 'others'"):
        run_command(monkeypatch, "two")
    (made / "two.yaml").write_text(text.replace("[made]", "[none]"))
    with pytest.raises(SystemExit, match="uses = none: no such file of tables"):
        run_command(monkeypatch, "two")


def test_unknown_table_and_page_without_place_are_refused(made, monkeypatch):
    with pytest.raises(SystemExit, match="no such file of tables; there are made"):
        run_command(monkeypatch, "other")
    (made / "page.md").write_text("# Page\n")
    with pytest.raises(SystemExit, match="needs one line `<!-- table: made -->`"):
        run_command(monkeypatch)


def test_list_has_date_and_seconds(made, monkeypatch, capsys):
    run_command(monkeypatch)
    run_command(monkeypatch, "--list")
    name, date, seconds, _ = capsys.readouterr().out.strip().split("\t")
    assert name == "made" and len(date) == 10 and seconds.endswith(" s")
