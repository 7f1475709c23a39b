"""`vcsd eval machine`, and overlays that are refused."""

import pytest
from pydantic import ValidationError

from nvmevirt_config.document import read_yaml
from vcsd_eval.papers import machines
from vcsd_eval.papers.machines import constant, experiment


def test_machine_reports_base_and_overlay_prefill_times():
    result = experiment("llama-3-8b", "h100", 16384, 1).result
    assert result["prefill_s"] == pytest.approx(0.876, abs=5e-4)
    outcome = {name: round(each["prefill_s"], 3) for name, each in result["overlays"].items()}
    assert outcome == {
        "dual-blade": 0.337,
        "hilos": 0.562,
        "instinfer": 0.337,
        "tierkv": 0.674,
        "tutti": 0.876,
        "tutti-few-tokens": 1.369,
        "a5000": 2.731,
        "a6000": 2.731,
    }
    assert result["overlays"]["instinfer"]["fields"][2]["fixed_by"] == "c8c"


def test_constant_equals_its_overlay_entry():
    result = constant("tutti", "prefill_tflops", "tutti-few-tokens", "few")
    assert (result.name, result.value, result.unit, result.fixed_by) == ("few", 245, "TFLOPS", "t15c")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mfu: {value: 1, unit: share}", "why"),
        ("mfu: {value: 1, unit: share, why: ''}", "why"),
        ("speed: {value: 1, unit: share, why: because}", "speed: must be one of mfu, start_ms"),
    ],
)
def test_invalid_overlay_is_refused_by_name(tmp_path, text, reason):
    path = tmp_path / "machine.yaml"
    path.write_text(f"model: llama-3-8b\ngpu: h100\noverlays: {{mine: {{{text}}}}}\n")
    with pytest.raises((ValueError, ValidationError), match=reason) as raised:
        read_yaml(path, machines.PaperMachine)
    assert str(path) in str(raised.value)
