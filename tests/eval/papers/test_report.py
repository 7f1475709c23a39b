"""The report on a small model: one self-contained page that a browser shows."""

import re
import subprocess

import pytest

from eval.papers import report
from eval.papers.instinfer import figures
from eval.papers.instinfer.evaluate import PAPER, evaluate_on
from eval.papers.options import Simulated
from tests.eval.papers.instinfer.setups import small_setup


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BATCHES", (2, 4)), ("BROKEN_DOWN", (2,)), ("COUNTS", (1, 2)), ("COMPRESSIONS", (1, 8))):
            patch.setattr(figures, name, value)
        return evaluate_on(small_setup(2, sampled_layers=1), Simulated(workers=1), True)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    return report.write_report([(PAPER, found)], tmp_path_factory.mktemp("report") / "out")


def test_report_page_is_self_contained(page):
    text = page.read_text()
    assert not re.search(r"(src|href)=.https?:|url\(.?https?:|@import", text)
    assert text.count("<svg") == 4
    assert text.count("<h1>InstInfer</h1>") == 1
    assert all(f">{claim.id}<" in text for claim in PAPER.claims)
    assert all(f">{each.name}<" in text for each in (*PAPER.calibrated, *PAPER.assumed))
    assert "1 of 2 layers simulated" in text
    assert "recorded_pages" in text
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]


def test_failed_report_keeps_previous_page(page, found, monkeypatch):
    before = page.read_bytes()
    monkeypatch.setattr(report, "as_svg", lambda figure: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write_report([(PAPER, found)], page.parent)
    assert page.read_bytes() == before


def test_report_page_renders_in_browser(page, tmp_path, chromium):
    shown = tmp_path / "shown.png"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,844"]
    subprocess.run([*command, f"--screenshot={shown}", page.as_uri()], check=True, capture_output=True, timeout=120)
    assert shown.stat().st_size > 10_000
