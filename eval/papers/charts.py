"""Interactive charts of a page: their data as JSON, one style for each name, and the script that draws them."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from vcsd_eval.papers.paper import Chart

LIGHT = (
    *("#1b6ca8", "#d1495b", "#2e8b57", "#b8741a", "#6a4c93", "#0f8b8d", "#c2559d", "#6b705c"),
    *("#8f3b1b", "#5468c4", "#7a9e1f", "#e0712b", "#4a4e69", "#a4133c", "#009fb7", "#947200"),
)
DARK = (  # the same hues on a dark page
    *("#6cb4ee", "#ff8fa0", "#6fd39b", "#f0b35b", "#b79ae6", "#5fd0d2", "#f29ad2", "#b9bfa3"),
    *("#e08a63", "#93a4f0", "#c2e05f", "#ffa769", "#a9aed1", "#ff6b8e", "#5fdcf0", "#e0c14a"),
)
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")  # markers
STYLES = "chart-styles"  # id of the element with the styles

_SCRIPT = """
const styles = JSON.parse(document.getElementById("chart-styles").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const title = (chart, column) => chart.units[column] ?? column;
const axisTitle = text => ({text, standoff: 12});
const color = name => styles[name][dark.matches ? "dark" : "light"];
const config = {responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]};

function lines(chart) {
  const [y] = chart.y, drawn = chart.rows.filter(row => row[y] !== null);
  return [...new Set(drawn.map(row => row[chart.series]))].map(name => {
    const rows = drawn.filter(row => row[chart.series] === name);
    return {type: "scatter", mode: "lines+markers", name, x: rows.map(row => row[chart.x]), y: rows.map(row => row[y]),
      line: {color: color(name)}, marker: {color: color(name), symbol: styles[name].symbol, size: 8}};
  });
}

function bars(chart) {
  const rows = chart.rows.filter(row => chart.y.every(part => row[part] !== null));
  const names = rows.map(row => `${row[chart.series]}, ${row[chart.x]}`);
  return chart.y.map(part => ({type: "bar", orientation: "h", name: title(chart, part), y: names,
    x: rows.map(row => row[part]), marker: {color: color(title(chart, part))}}));
}

function draw(box) {
  const chart = JSON.parse(box.querySelector("script").textContent), isStack = chart.kind === "stack";
  const style = getComputedStyle(document.documentElement), text = style.getPropertyValue("--text");
  const axis = {gridcolor: style.getPropertyValue("--line"), automargin: true, rangemode: "tozero"};
  const traces = isStack ? bars(chart) : lines(chart);
  const ticks = [...new Set(chart.rows.map(row => row[chart.x]))];
  const layout = {
    height: isStack ? 150 + 24 * traces[0].y.length : 440, margin: {l: 56, r: 12, t: 36, b: 52}, barmode: "stack",
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: {color: text, size: 12}, showlegend: true,
    modebar: {bgcolor: "transparent", color: style.getPropertyValue("--quiet"), activecolor: text},
    legend: {orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom"},
    xaxis: isStack ? {...axis, title: axisTitle(title(chart, "y"))}
      : {...axis, title: axisTitle(title(chart, chart.x)), type: "log", tickvals: ticks, ticktext: ticks.map(String)},
    yaxis: isStack ? {...axis, title: axisTitle(`${chart.series}, ${title(chart, chart.x)}`), autorange: "reversed"}
      : {...axis, title: axisTitle(title(chart, chart.y[0]))},
  };
  Plotly.react(box.querySelector(".plot"), traces, layout, config);
}

const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
drawAll();
dark.addEventListener("change", drawAll);
"""


def chart_element(chart: Chart, title: str) -> str:
    """A chart's place on the page, with its data. title: for readers who cannot see it."""
    columns = (chart.x, chart.series, *chart.y)
    rows = [{column: row[column] for column in columns} for row in chart.rows]
    data = {
        "kind": chart.kind,
        "rows": rows,
        "x": chart.x,
        "y": chart.y,
        "series": chart.series,
        "units": dict(chart.units),
    }
    return (
        f'<div class="chart"><div class="plot" role="img" aria-label="{html.escape(title)}"></div>'
        f'<script type="application/json">{_json(data)}</script></div>'
    )


def chart_scripts(charts: Sequence[Chart]) -> str:
    """Styles, plotly.js and the script that draws a page's charts."""
    from plotly.offline import get_plotlyjs

    return (
        f'<script type="application/json" id="{STYLES}">{_json(chart_styles(charts))}</script>'
        f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script>"
    )


def chart_styles(charts: Sequence[Chart]) -> dict[str, dict[str, str]]:
    """Colours and marker of each name in the charts' legends; a name has the same ones in all charts."""
    names = dict.fromkeys(name for chart in charts for name in _names(chart))
    return {
        name: {
            "light": LIGHT[number % len(LIGHT)],
            "dark": DARK[number % len(DARK)],
            "symbol": SYMBOLS[number % len(SYMBOLS)],
        }
        for number, name in enumerate(names)
    }


def _names(chart: Chart) -> list[str]:
    """Names in a chart's legend: systems of lines, parts of bars."""
    if chart.kind == "stack":
        return [chart.units.get(part, part) for part in chart.y]
    return [row[chart.series] for row in chart.rows]


def _json(data: Any) -> str:
    """JSON that a script element may contain."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")
