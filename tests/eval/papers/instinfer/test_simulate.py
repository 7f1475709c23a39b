"""A drive without payload: the pages that it must read, for a pattern with a given share of touched pages."""

from dataclasses import replace

import numpy as np

from csd_spec import CompressionBudget
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as PAPER
from vcsd_eval.papers.instinfer.simulate import Pattern, SimulatedDrive
from vcsd_eval.papers.profiles import Model


def test_pattern_touches_stated_fraction_of_pages():
    pattern, each = Pattern(0.3, 16), np.ones(50, np.int64)
    tokens = pattern.best_tokens(None, 1536 * each, 192 * each, 48 * each)
    assert tokens.shape == (50, 192)
    assert (np.diff(tokens, axis=1) > 0).all()
    assert {np.unique(row // 16).size for row in tokens} == {29}
    tokens, counts = pattern.top_pages(None, 1530 * each, 16, 10 * each, each)
    assert (counts == 10 * 16 + 10).all()
    assert (np.diff(tokens, axis=1) > 0).all()


def test_simulated_step_reads_required_pages():
    shape = Model.load("opt-13b").shape
    drive = SimulatedDrive(PAPER, replace(shape, layers=4), 3, 2048, "fp16")
    drive.grow(1024)
    before = drive.ftl.counters.read
    assert drive.step("dense", CompressionBudget(1).at(1024, 128), 1.0, "serial")["flash_token"] > 0
    assert drive.ftl.counters.read - before == 4 * 3 * 40 * 2 * 64
