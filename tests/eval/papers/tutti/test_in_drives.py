"""Attention to a stored prefix inside drives: its bounds, and the cases in which loading is faster.

partner of: eval/papers/tutti/in_drives.py, eval/papers/tutti/reuse.py
"""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from csd_spec.presets import INSTCSD_OVERLAPPED
from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti.evaluate import TUTTI
from vcsd_eval.papers.tutti.in_drives import Drives, crossover, table_rows
from vcsd_eval.papers.tutti.reading import GpuReading, Path
from vcsd_eval.papers.tutti.reuse import PrefixQuestion, reuse

MODEL = Model.load("llama-3-8b")
READING = GpuReading.on(MODEL, Gpu.load("h100"), overlay("tutti", "tutti-few-tokens"))
EIGHT = Drives(INSTCSD_OVERLAPPED, 8, MODEL.shape)
PREFIX = 131_072


def engines(factor):
    """Eight drives whose engines are faster by `factor`."""
    engine = replace(EIGHT.spec.engine, kernels=EIGHT.spec.engine.kernels * factor)
    return Drives(replace(EIGHT.spec, engine=engine), 8, MODEL.shape)


def test_prefix_is_read_once_and_computed_per_query():
    one, many = (EIGHT.layer(new, PREFIX) for new in (1, 64))
    assert one.flash_s == many.flash_s == pytest.approx(PREFIX * 4096 / 8 / 11.2e9)
    assert many.engine_s == pytest.approx(64 * one.engine_s, rel=1e-3)
    assert many.engine_s == pytest.approx(64 * PREFIX * 2 * 4 * 128 / (116 * 285e6), rel=1e-3)
    assert (one.bound, many.bound) == ("flash", "engine")


def test_pages_are_whole_and_drives_with_more_heads_take_longer():
    assert EIGHT.layer(1, 1).flash_s == EIGHT.layer(1, 16).flash_s < EIGHT.layer(1, 17).flash_s
    three, four = (Drives(INSTCSD_OVERLAPPED, count, MODEL.shape) for count in (3, 4))
    assert three.layer(4, PREFIX).engine_s > four.layer(4, PREFIX).engine_s
    with pytest.raises(ValueError, match="drives = 9: must be 1 to 8"):
        Drives(INSTCSD_OVERLAPPED, 9, MODEL.shape)


def test_one_token_faster_in_drives_prompt_loaded():
    assert crossover(EIGHT, READING, 1, TUTTI) == 3072
    for new in (16, 64, 256):
        assert crossover(EIGHT, READING, new, TUTTI) is None
    slow = Path(1.21e9)
    assert crossover(EIGHT, READING, 64, slow) == 1024 and crossover(EIGHT, READING, 256, slow) is None


def test_drives_with_required_engine_equal_loading():
    needed = EIGHT.engine_needed(READING, 16, PREFIX, TUTTI)
    has = 116 * 285e6
    assert 3 < needed / has < 4
    loaded = READING.first_token_s(16, PREFIX, TUTTI)
    assert engines(3).first_token_s(READING, 16, PREFIX) > loaded > engines(4).first_token_s(READING, 16, PREFIX)
    two = Drives(INSTCSD_OVERLAPPED, 2, MODEL.shape)
    assert two.engine_needed(READING, 1, PREFIX, TUTTI) is None  # their flash is slower than loading


def test_combined_never_slower_than_loading():
    gains = []
    for new in (1, 4, 16, 64, 256):
        share, time = EIGHT.split_s(READING, new, PREFIX, EIGHT.path())
        loaded = READING.first_token_s(new, PREFIX, EIGHT.path())
        assert time <= loaded and 0 <= share <= 1
        assert time >= MODEL.layers * EIGHT.layer(new, PREFIX).flash_s
        gains.append(loaded / time)
    assert gains == sorted(gains, reverse=True) and gains[2] > 1.2 and gains[-1] == 1


def test_in_drives_has_a_row_per_question_and_prefix():
    rows = list(table_rows(EIGHT, READING, TUTTI, (1, 16), (8192, PREFIX)))
    assert [(row["new"], row["prefix"]) for row in rows] == [(1, 8192), (1, PREFIX), (16, 8192), (16, PREFIX)]
    assert rows[1]["in_drives_s"] < rows[1]["load_s"] and rows[3]["in_drives_s"] > rows[3]["load_s"]


def test_in_drives_text_has_times_and_crossovers():
    question = PrefixQuestion(drives="2,8", new="1,16", prefix="8192")
    outcome = reuse(Model.load("llama-3-8b"), Gpu.load("h100"), question)
    json.dumps(outcome.result)
    assert len(outcome.result["rows"]) == len(outcome.result["drives_faster_from"]) == 4
    page = io.StringIO()
    for part in outcome.shown:
        Console(file=page, width=160).print(part)
    assert "never, to 1,048,576" in page.getvalue() and "none would do" in page.getvalue()
