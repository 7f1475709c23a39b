"""The report on a small model: one self-contained page that a browser shows.

partner of: eval/papers/charts.py, eval/papers/page.py
"""

import json
import re
import statistics
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version

import pytest
from plotly.offline import get_plotlyjs

from tests.eval.papers.instinfer.setups import small_setup
from vcsd import progress
from vcsd_eval.papers import report
from vcsd_eval.papers.charts import DARK, LIGHT, chart_styles
from vcsd_eval.papers.instinfer import figures
from vcsd_eval.papers.instinfer.evaluate import PAPER, evaluate_on
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.page import MAX_SHOWN_VALUES, as_text, label, table, values_table
from vcsd_eval.papers.paper import FOLLOWS, Chart, judge

SCHEMES = {"dark": 0, "light": 1}  # numbers of Chromium
LISTENER = "<script>const errors = []; addEventListener('error', event => errors.push(event.message));</script>"
FINDINGS = """<script>
addEventListener("load", () => setTimeout(() => parent.postMessage({
  errors,
  widths: [innerWidth, document.documentElement.scrollWidth],
  charts: [...document.querySelectorAll(".plot")].map(plot => ({
    width: plot.querySelector("svg")?.clientWidth,
    ticks: plot.querySelectorAll(".xtick").length,
    titles: [plot.layout.xaxis.title.text, plot.layout.yaxis.title.text],
    colors: plot.data.map(trace => [trace.name, trace.marker.color]),
  })),
  cells: [...document.querySelectorAll("#instinfer-claims + .scroll tbody tr:first-child td")].map(
    cell => cell.getBoundingClientRect().right),
}, "*"), 500));
</script>"""
FRAME = """<!doctype html><pre id="findings"></pre><script>
addEventListener("message", event => findings.textContent = JSON.stringify(event.data));
</script><iframe src="shown.html" width="{width}" height="844" style="border: 0"></iframe>"""


class Elements(HTMLParser):
    """Elements of a page: texts of its JSON scripts, ids, links, headings and tables' cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.scripts, self.tables = [], [], [], [], []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []
        if tag == "script":
            self.scripts.append((values.get("type"), values.get("id"), ""))
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            kind, name, _ = self.scripts[-1]
            self.scripts[-1] = kind, name, data
        elif self._inside in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def charts(self):
        return [json.loads(text) for kind, name, text in self.scripts if kind == "application/json" and not name]


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BATCHES", (2, 4)), ("BROKEN_DOWN", (2,)), ("COUNTS", (1, 2)), ("COMPRESSIONS", (1, 8))):
            patch.setattr(figures, name, value)
        return report.PaperResult(PAPER, evaluate_on(small_setup(2, sampled_layers=1), Simulated(workers=1), True), 90)


@pytest.fixture(scope="module")
def page(result, tmp_path_factory):
    return report.write_report([result], tmp_path_factory.mktemp("report") / "out")


@pytest.fixture(scope="module")
def elements(page):
    return Elements(page.read_text())


def test_report_page_is_self_contained(page):
    text = page.read_text()
    assert text.count(get_plotlyjs()) == 1
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"https?:|src=|url\(|@import", own)
    assert "default-src 'none'" in own
    assert all(f">{claim.id}<" in own for claim in PAPER.claims)
    assert all(f">{each.name}<" in own for each in (*PAPER.calibrated, *PAPER.assumed))
    assert "1 of 2 layers simulated" in own
    assert "recorded pages" in own
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]


def test_page_has_one_title_and_contents_with_targets(elements):
    assert elements.tags.count("title") == elements.tags.count("h1") == 1
    assert len(elements.ids) == len(set(elements.ids))
    assert {link.removeprefix("#") for link in elements.links} <= set(elements.ids)
    assert len(elements.links) == elements.tags.count("h2") + elements.tags.count("h3")
    assert {"summary", "instinfer-claims", "reproduce-instinfer", "versions"} <= set(elements.ids)
    assert "pre" not in elements.tags


def test_charts_have_rows_of_evaluation_with_names(elements, result):
    charts = [section.chart for section in result.evaluation.sections if section.chart]
    assert len(charts) == 4
    for chart, shown in zip(charts, elements.charts(), strict=True):
        columns = {chart.x, chart.series, *chart.y}
        assert shown["rows"] == [{name: row[name] for name in columns} for row in chart.rows]
        assert all(isinstance(row[chart.series], str) for row in shown["rows"])
        assert chart.x in chart.units
        assert ("y" if chart.kind == "stack" else chart.y[0]) in chart.units


def test_parts_of_stacked_bars_add_up(elements):
    (stack,) = (chart for chart in elements.charts() if chart["kind"] == "stack")
    sums = [sum(row[part] for part in stack["y"]) for row in stack["rows"] if row[stack["y"][0]] is not None]
    assert len(sums) > 2
    assert sums == pytest.approx([1] * len(sums))


def test_name_has_one_style_in_all_charts():
    units = {"n": "number", "kv": "KV data"}
    rows = [{"n": 1, "y": 2, "name": name, "kv": 1, "b": 2} for name in "abab"]
    charts = [
        Chart("lines", rows, "n", ("y",), "name", units),
        Chart("stack", rows, "n", ("kv", "b"), "name", units),
    ]
    styles = chart_styles(charts)
    assert list(styles) == ["a", "b", "KV data"]
    assert [style["light"] for style in styles.values()] == list(LIGHT[:3])
    assert len({*LIGHT, *DARK}) == len(LIGHT) + len(DARK)


def test_more_names_than_colours_have_other_markers():
    rows = [{"n": 1, "y": 2, "name": f"system {number}"} for number in range(2 * len(LIGHT))]
    styles = chart_styles([Chart("lines", rows, "n", ("y",), "name", {})])
    assert len({tuple(style.values()) for style in styles.values()}) == len(rows)


def test_summary_has_counts_and_errors_of_judge(elements, result):
    judged = judge(PAPER, result.evaluation)
    errors = [abs(row["error_percent"]) for row in judged["rows"] if row["kind"] in FOLLOWS]
    head, row = elements.tables[0]
    shown = dict(zip(head, row, strict=True))
    assert shown["claims compared"] == str(judged["predicted_rows"]) == str(len(errors))
    assert shown["within 10 %"] == str(sum(error <= 10 for error in errors))
    assert shown["median error, %"] == f"{statistics.median(errors):.1f}"
    assert shown["worst error, %"] == f"{max(errors):.1f}"
    assert shown["claim with the worst error"].startswith(f"{judged['worst_row']}: ")
    assert shown["contradicted"] == str(judged["counts"]["contradicts"])
    assert shown["not determined"] == str(judged["counts"]["not determined"])


def test_computed_claim_has_command_minutes_and_tolerance(result):
    rows = report.reproduction_rows(result)
    shown = [name for row in rows for name in row["shows"].split(", ")]
    judged = judge(PAPER, result.evaluation)["rows"]
    computed = [row["id"] for row in judged if row["kind"] in ("calibrated", "derived", "predicted", "contradicts")]
    assert [shown.count(name) for name in computed] == [1] * len(computed)
    assert {row["minutes"] for row in rows} == {1.5}
    assert {row["tolerance"] for row in rows} == {"15 %", "3 points", "-"}
    assert all(row["command"].startswith("vcsd ") for row in rows)


def test_nested_values_are_tables_of_two_columns():
    shown = Elements(
        values_table({"a": {"b_s": 1.5, "on": True}, "rows": [{"x": 1}, {"x": 2, "y": None}], "l": [1, 2]})
    )
    assert shown.tables == [[["a: b, s", "1.5"], ["a: on", "yes"], ["l", "1, 2"]], [["x", "y"], ["1", "-"], ["2", "-"]]]


def test_many_values_are_closed_until_opened():
    assert "<details>" not in values_table({str(name): 1 for name in range(MAX_SHOWN_VALUES)})
    assert "<details>" in values_table({str(name): 1 for name in range(MAX_SHOWN_VALUES + 1)})


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("step_s", "step, s"),
        ("tokens_per_s", "tokens/s"),
        ("gpu_link_gb_per_s", "gpu link, GB/s"),
        ("s", "s"),
        ("units_s_20_drives", "units s 20 drives"),
        ("median_error_percent", "median error, %"),
    ],
)
def test_label_has_unit_after_comma(name, shown):
    assert label(name) == shown


def test_text_of_table_is_escaped():
    assert "<b>" not in table([{"a": "<b>"}], {"a": "<b>"})
    assert [as_text(value) for value in (6561, 12345.4, 3.4e38, -0.123456)] == ["6,561", "12,345", "3.4e+38", "-0.1235"]


def test_report_command_evaluates_papers_writes_page(result, tmp_path, monkeypatch, capsys):
    paper = replace(PAPER, evaluate=lambda *_: result.evaluation)
    monkeypatch.setattr(report, "load", lambda name: paper)
    monkeypatch.setattr(report, "PAPERS", ["instinfer"])
    report.report(MachineOptions(), Simulated(), tmp_path / "new")
    assert "index.html" in capsys.readouterr().err
    shown = Elements((tmp_path / "new" / "index.html").read_text())
    assert len(shown.charts()) == 4
    assert ["plotly", version("plotly")] in shown.tables[-1]


@pytest.mark.long
def test_papers_in_processes_have_the_same_results(monkeypatch, capsys):
    monkeypatch.setattr(report, "PAPERS", ["tierkv", "tutti"])
    monkeypatch.setattr(progress, "PERIOD_S", 0.2)
    one, two = (report.evaluate_papers(MachineOptions(), Simulated(workers=workers)) for workers in (1, 2))
    assert [each.paper.name for each in two] == ["tierkv", "tutti"]
    assert [each.evaluation for each in one] == [each.evaluation for each in two]
    shown = capsys.readouterr().err
    assert re.search("papers: 0 of 2; (tierkv|tutti)", shown)


def test_failed_report_keeps_previous_page(page, result, monkeypatch):
    before = page.read_bytes()
    monkeypatch.setattr(report, "chart_element", lambda chart, title: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write_report([result], page.parent)
    assert page.read_bytes() == before


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "light"), (390, "dark")])
def test_page_in_browser_no_errors_no_overflow(page, elements, tmp_path, chromium, width, scheme):
    """The page is in a frame of that width, since a window may not be as narrow as a phone."""
    shown = page.read_text().replace("<head>", f"<head>{LISTENER}").replace("</body>", f"{FINDINGS}</body>")
    (tmp_path / "shown.html").write_text(shown)
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom"]
    ended = subprocess.run(
        [*command, (tmp_path / "frame.html").as_uri()], check=True, capture_output=True, text=True, timeout=300
    )
    assert not re.search(r":CONSOLE.*", ended.stderr)
    outcome = json.loads(re.search(r'<pre id="findings">(.*?)</pre>', ended.stdout)[1].replace("&amp;", "&"))
    assert outcome["errors"] == []
    assert outcome["widths"] == [width, width]
    assert outcome["cells"][3] <= width, "id, error, and both values are visible"
    assert len(outcome["charts"]) == 4
    (styles,) = (json.loads(text) for _, name, text in elements.scripts if name == "chart-styles")
    for chart in outcome["charts"]:
        assert 300 < chart["width"] <= width
        assert chart["ticks"] > 1
        assert all(chart["titles"])
        assert all(color == styles[name][scheme] for name, color in chart["colors"])
