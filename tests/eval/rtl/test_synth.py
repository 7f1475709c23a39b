"""Input of the synthesis tools, and parsing of their output; the tools themselves take minutes."""

import json
from dataclasses import replace

import pytest

from vcsd_eval.rtl import synth


def test_sources_include_all_submodules():
    names = {path.stem for path in synth.sources("gemv_qk")}
    assert {"gemv_qk", "fp16_dot"} <= names
    assert "sparf_engine" not in names
    assert names < {path.stem for path in synth.sources("sparf_engine")}


def test_cells_are_counted_as_resources(tmp_path, monkeypatch):
    cells = {"LUT6": 10, "LUT2": 5, "RAM32M": 2, "SRL16E": 3, "FDRE": 7, "RAMB36E1": 1, "RAMB18E1": 3, "DSP48E1": 4}
    (tmp_path / "stat.json").write_text(json.dumps({"design": {"num_cells_by_type": cells}}))
    monkeypatch.setattr(synth, "_yosys", lambda *arguments: None)
    assert synth.resources(synth.UNITS[0], tmp_path) == (10 + 5 + 8 + 3, 7, 2.5, 4)


def test_exceeded_resource_limits_are_named():
    small = synth.Measured(lut=10, ff=1, bram=0, dsp=1, fmax_mhz=150.0, critical_path="a to b")
    result = {synth.label(unit): small for unit in synth.UNITS}
    result["sparf_engine"] = replace(small, lut=20_000)
    assert synth.kernels(result) == (20_000 - 30, -2, 0, -2)
    assert synth.broken(result) == []
    result |= {"sparf_engine": replace(small, lut=30_000, dsp=200), "argtopk N = 32768": replace(small, lut=4_000)}
    result["skid"] = replace(small, fmax_mhz=90.0)
    said = synth.broken(result)
    assert [line.split(":")[0] for line in said] == ["attention kernels", "attention kernels", "argtopk", "skid"]


@pytest.mark.parametrize("unit", synth.UNITS, ids=synth.label)
def test_every_unit_has_its_sources(unit):
    assert f"{unit.top}.sv" in {path.name for path in synth.sources(unit.top)}
