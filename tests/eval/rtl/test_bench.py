"""`vcsd bench rtl`: recorded rows in the RTL and in its golden model.

partner of: eval/rtl/bench.py, eval/rtl/dut.py, eval/rtl/measured.py
"""

import pytest

from vcsd_eval.rtl import bench, synth
from vcsd_eval.rtl.bench import Rows, experiment, golden, recorded
from vcsd_eval.rtl.measured import MEASURED


def test_stored_sizes_are_of_measured_units():
    assert MEASURED.keys() <= {synth.label(unit) for unit in synth.UNITS}
    assert all(unit.fmax_mhz >= synth.MIN_MHZ for unit in MEASURED.values())


def test_pages_are_cut_at_the_last_token():
    shape, heads, lengths = recorded(250)
    assert lengths == [shape.form.T, 250 - shape.form.T] and len(heads) == 4
    assert golden(heads[0], lengths, shape).shape == (250 * shape.q_heads, 3)


@pytest.mark.rtl
def test_scores_are_equal_and_cycles_the_clocks():
    outcome = experiment(Rows(tokens=40))
    result = outcome.result
    assert result["equal_scores"] and not outcome.failed
    assert result["scores"] == 4 * 2 * 40 and result["formula_off"] <= 0.02
    assert result["resources"]["digit_scores"]["lut"] == MEASURED["digit_scores"].lut
    assert result["paper_table_1"]["argtopk"]["lut"] == 5830 and "digit_scores" in result["counted"]


def test_unequal_scores_are_a_failure(monkeypatch):
    def off(shape, heads, lengths, simulator):
        return [(golden(head, lengths, shape) + (number == 2), 100) for number, head in enumerate(heads)]

    monkeypatch.setattr(bench, "simulated", off)
    outcome = experiment(Rows(tokens=20))
    assert outcome.failed and not outcome.result["equal_scores"]
    assert "NOT equal" in outcome.notes[0]


def test_missing_simulator_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="simulator = 'spice'"):
        experiment(Rows(tokens=16, simulator="spice"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="not on the PATH"):
        experiment(Rows(tokens=16))
