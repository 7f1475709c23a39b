"""The fuzzer finds no defects, and finds planted ones.

partner of: eval/verify/coverage.py, eval/verify/fuzz_values.py
"""

import pytest

from csd_firmware import Firmware
from csd_firmware.tenants import Tenant
from csd_firmware.values import Values
from vcsd_eval.verify.fuzz import bench_fuzz

CLEAN = {"crashes": 0, "hangs": 0, "leaks": 0, "state_changes": 0, "values_wrong": 0}


def run(inputs, medium="memory"):
    result = bench_fuzz(inputs, 3, lambda _: None, medium)
    return result, {key: result[key] for key in CLEAN}


@pytest.mark.parametrize(("medium", "inputs"), [("memory", 4000), ("direct", 2000)])
def test_fuzz_finds_nothing(medium, inputs):
    result, outcome = run(inputs, medium)
    assert outcome == CLEAN, result["notes"]
    assert result["medium"] == medium
    assert result["accepted"] > 50
    assert result["corpus"] > 30


def test_fuzz_detects_read_of_another_tenant(monkeypatch):
    monkeypatch.setattr("csd_firmware.tenants.HandleCipher.encrypt", lambda self, number: number)
    monkeypatch.setattr("csd_firmware.tenants.HandleCipher.decrypt", lambda self, handle: handle)
    monkeypatch.setattr(Tenant, "_owns", lambda self, number: number in self._firmware.ftl.sequences)
    assert run(8000)[1]["leaks"] > 0


def test_fuzz_detects_firmware_crash(monkeypatch):
    step = Tenant.step

    def broken(self, command, submit_ns, *max_bytes):
        if getattr(command, "layer", 0) > 1000:
            raise IndexError("layer")
        return step(self, command, submit_ns, *max_bytes)

    monkeypatch.setattr(Tenant, "step", broken)
    assert run(600)[1]["crashes"] > 0


def test_fuzz_detects_refusal_with_effect(monkeypatch):
    step = Firmware.step

    def forgetful(self, command, submit_ns, *tenant_and_limit):
        done = step(self, command, submit_ns, *tenant_and_limit)
        if done.status:
            self.free_ns += 1
        return done

    monkeypatch.setattr(Firmware, "step", forgetful)
    assert run(600)[1]["state_changes"] > 0


def test_fuzz_detects_retrieve_of_another_tenant(monkeypatch):
    monkeypatch.setattr("csd_firmware.values.label_of", lambda name: 0)
    assert run(8000)[1]["leaks"] > 0


def test_fuzz_detects_key_without_its_length(monkeypatch):
    store = Values.store
    monkeypatch.setattr(Values, "store", lambda self, key, *rest: store(self, key.rstrip(b"\0") or b"a", *rest))
    assert run(1500)[1]["values_wrong"] > 0


def test_fuzz_detects_overwrite_undone_by_power_loss(monkeypatch):
    monkeypatch.setattr(Values, "flush", lambda self: None)
    assert run(8000)[1]["values_wrong"] > 0
