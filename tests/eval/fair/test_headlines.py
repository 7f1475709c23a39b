"""partner of: eval/fair/headline.py, eval/fair/fair.py, eval/fair/instinfer.py, eval/fair/recorded.py,
eval/fair/orbitflow.py, eval/fair/tierkv.py, eval/fair/dual_blade.py, eval/fair/tutti.py"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from csd_spec.presets import INSTCSD_OVERLAPPED
from vcsd.progress import no_tick
from vcsd_eval.fair import instinfer, orbitflow, tierkv, tutti
from vcsd_eval.fair.fair import PAPERS
from vcsd_eval.fair.headline import CONDITIONS, Headline, HeadlineFigure, Ranged, Varied, varied_drive
from vcsd_eval.fair.recorded import RecordedRows
from vcsd_eval.papers.instinfer.options import setup_of
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.serving.machines import A5000, beside_plain_ssds, drives

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
COMMAND = "`vcsd eval fair"


def rows(**given):
    known = {
        "model": "a model",
        "sparf_error": 0.1,
        "ours_error": {5.0: 0.05, 8.0: 0.2},
        "sparf_bytes": 0.9,
        "ours_bytes": 0.2,
        "page_share": 0.5,
    }
    return RecordedRows(**{**known, **given})


def test_equal_error_budget_is_within_tried_budgets():
    assert rows(sparf_error=0.05).equal_c == pytest.approx(5)
    assert rows(sparf_error=0.01).equal_c == pytest.approx(5)
    assert rows(sparf_error=9.0).equal_c == pytest.approx(8)
    halfway = rows().equal_c
    assert 1 / halfway == pytest.approx((1 / 5 + 1 / 8) / 2)


def test_range_halves_and_doubles_every_constant():
    constants = [Varied("a", 2.0, "s", lambda factor: (2 * factor, 3)), Varied("b", 3, "s", lambda f: (2, 3 * f))]
    result = Ranged.of((2, 3), constants, lambda case: {"sum": case[0] + 10 * case[1]})
    assert result.figure("sum", "command") == HeadlineFigure(32, 17, 62, "command")
    assert [row["constant"] for row in result.tornado("sum")] == ["b", "a"]
    assert HeadlineFigure.over([3, 1, 2], "command") == HeadlineFigure(2, 1, 3, "command")


def test_varied_constant_changes_only_itself():
    base = INSTCSD_OVERLAPPED
    for each in varied_drive(base, lambda drive: drive):
        part, name = each.name.split(".")
        changed = each.scaled(2.0)
        assert getattr(getattr(changed, part), name) == 2 * each.base
        assert replace(changed, **{part: getattr(base, part)}) == base


def test_a_headline_without_a_condition_is_refused():
    with pytest.raises(ValueError, match="same_error"):
        Headline(what="x", figures={name: HeadlineFigure(1, 1, 1, "") for name in CONDITIONS if name != "same_error"})


def test_ratio_over_sparf_falls_as_more_is_equal(monkeypatch):
    monkeypatch.setattr("vcsd_eval.papers.instinfer.fill.SAMPLED_PAGES", 100_000)
    setup = setup_of(MachineOptions(), Simulated())
    case = instinfer.InstInferCase(setup, page_share=0.5, equal_c=6.0)
    result = instinfer.ratios(case)
    assert result["same_schedule"] < result["same_error"]
    assert 1 < result[instinfer.BOTH] < result["same_error"]
    fewer = instinfer.ratios(replace(case, page_share=0.25))
    assert fewer[instinfer.BOTH] < result[instinfer.BOTH]
    assert fewer["same_hardware_plain_ssd"] == result["same_hardware_plain_ssd"]


def test_serving_drives_are_limited_by_their_engines():
    fast, real = (replace(INSTCSD_OVERLAPPED, engine=replace(INSTCSD_OVERLAPPED.engine, lanes=n)) for n in (4096, 64))
    assert drives(1, "progressive", fast).bytes_per_s == 8 * 1.4e9
    slow = drives(1, "progressive", real)
    assert 1e9 * slow.token_bytes / slow.bytes_per_s == pytest.approx(248, abs=1)  # ns a token and layer
    assert drives(1, "fp16", real).bytes_per_s == 8 * 1.4e9


def test_plain_ssds_add_their_links_to_the_host_s():
    token_bytes = A5000.layers * A5000.token_bytes
    alone, both = (token_bytes / cost.fetch_token_s for cost in (A5000, beside_plain_ssds(A5000, 2)))
    assert both == pytest.approx(alone + 2 * INSTCSD_OVERLAPPED.link.bytes_per_s)


def test_orbitflow_compares_on_generated_requests_too(monkeypatch):
    monkeypatch.setattr(orbitflow, "LOADS", (2.0,))
    monkeypatch.setattr(orbitflow, "SCALES", (1.5,))
    result = orbitflow.headline(None, no_tick)
    assert result.figures["same_service"] == result.figures["same_schedule"]
    assert result.figures["as_published"].value >= result.figures["same_schedule"].value


def test_tierkv_gains_less_at_equal_stays(monkeypatch):
    monkeypatch.setattr(tierkv, "ROOMS_GB", (8.0,))
    monkeypatch.setattr(tierkv, "COUNT", 40)
    result = tierkv.headline(no_tick)
    assert result.figures["same_service"].value <= result.figures["as_published"].value


def test_drives_lose_for_many_new_tokens():
    result = tutti.headline()
    assert result.figures["same_hardware_plain_ssd"].value < result.figures["as_published"].value
    assert {row["value"] for row in result.loses_at} >= {64, 256}


def table_rows():
    """Rows of tables in the documentation whose command is `vcsd eval fair`."""
    return [
        (page.name, line) for page in PAGES for line in page.read_text().splitlines() if "|" in line and COMMAND in line
    ]


def figures():
    """What `vcsd eval fair -o json` printed when the tables were made, as text."""
    runs = json.loads((DOCS / "_tables/fair.json").read_text())
    assert {paper.replace("-", "_") for paper in PAPERS} <= set(runs)
    for headline in (run["values"]["all"] for run in runs.values() if run["command"].startswith("vcsd eval fair")):
        groups = [headline, *(each for each in headline.values() if isinstance(each, dict) and "as_published" in each)]
        for group in groups:
            for each in group.values():
                if isinstance(each, dict) and "value" in each:
                    yield from (f"{each[key]:.2f}" for key in ("value", "low", "high"))
        yield from (f"{row[key]:.2f}" for row in headline["tornado"] for key in ("half", "double"))
        yield from (f"{row['ratio']:.2f}" for row in headline["loses_at"])


def test_docs_quote_only_printed_ratios():
    known = set(figures())
    quoted = [(page, number) for page, line in table_rows() for number in re.findall(r"(\d+\.\d\d)x", line)]
    assert len(quoted) > 10
    assert [each for each in quoted if each[1] not in known] == []


OURS_OVER = re.compile(r"\| *(`ours`|`split`|`mended`|`paged`|ours|split|mended)[^|]* over ", re.IGNORECASE)


def test_docs_compare_with_papers_only_fairly():
    rivals = ("InstI", "SparF", "Dual-Blade", "TierKV", "OrbitFlow", "Tutti")
    unfair = [
        (page.name, line)
        for page in PAGES
        for line in page.read_text().splitlines()
        if OURS_OVER.match(line) and any(name in line for name in rivals) and COMMAND not in line
    ]
    assert unfair == []
