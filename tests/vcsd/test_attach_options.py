"""Options of `vcsd.attach`: defaults, kinds, and types for a type checker.

partner of: vcsd/attach_options.py, vcsd/__init__.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vcsd
from csd_link.driveset import DriveSetConfig
from kv_cache.limits import TierLimits
from tests.host_driver.hf.test_cache import llama
from vcsd.attach_options import _OPTIONS, DriveOptions, attention_of, check_in_tiers, checked, drives_of

USES = """
import vcsd
from transformers import LlamaForCausalLM

def use(model: LlamaForCausalLM) -> None:
    with vcsd.attach(model, drives=2, compression=8) as run:
        reveal_type(run)
    with vcsd.attach(model, policy="auto", tiers=vcsd.TierLimits()) as tiered:
        reveal_type(tiered)
    with vcsd.serve(model, vcsd.ServingConfig(policy="lru")) as server:
        reveal_type(server)
    vcsd.attach(model, compresion=8)
"""


def test_every_option_has_a_type_a_default_and_a_kind() -> None:
    assert set(_OPTIONS) == set(DriveOptions.__annotations__)
    given = checked(1, "sparf", {})
    assert given == {name: default for name, (default, _, _) in _OPTIONS.items()} | {"drives": 1, "method": "sparf"}
    assert attention_of(given).method == "sparf"
    drives = drives_of(given)
    assert isinstance(drives, DriveSetConfig) and drives.count == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"flush_interval_steps": True}, "flush_interval_steps = True: must be a whole number"),
        ({"restart_drives": 1}, "restart_drives = 1: must be True or False"),
        ({"budget": 8}, "budget = 8: must be a CompressionBudget"),
        ({"data_dir": "here"}, "data_dir = 'here': must be a pathlib.Path"),
        ({"drives": 1.5}, "drives = 1.5: must be a whole number, a fleet"),
        ({"method": None}, "method = None: must be text"),
    ],
)
def test_option_of_wrong_type_is_refused(options: dict[str, Any], reason: str) -> None:
    given = {"drives": 1, "method": "sparf"} | options
    with pytest.raises(ValueError, match=reason):
        checked(given.pop("drives"), given.pop("method"), given)


def test_unknown_option_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"attach\(\) got an unexpected keyword argument 'compresion'"):
        vcsd.attach(llama(), compresion=8)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'sizes'"):
        vcsd.attach(llama(), policy="auto", sizes=8)  # type: ignore[call-overload]


def test_drive_option_with_tiers_is_refused() -> None:
    check_in_tiers("auto", TierLimits(), 1, "sparf", {})
    with pytest.raises(ValueError, match="spares is a drive option"):
        check_in_tiers("auto", None, 1, "sparf", {"spares": 1})
    with pytest.raises(ValueError, match="tiers = 5: must be a TierLimits"):
        check_in_tiers("auto", 5, 1, "sparf", {})  # type: ignore[arg-type]


@pytest.mark.slow
def test_public_names_have_types(tmp_path: Path) -> None:
    names = "".join(f"reveal_type(vcsd.{name})\n" for name in vcsd.__all__)
    (tmp_path / "uses.py").write_text(f"{USES}\n{names}")
    mypy = [sys.executable, "-m", "mypy", str(tmp_path / "uses.py")]
    done = subprocess.run(mypy, capture_output=True, text=True, env={**os.environ, "MYPYPATH": "."})
    for shown in ('"vcsd.session.DriveSession"', '"vcsd.tiered.TierSession"', '"vcsd.server.Server"'):
        assert f"Revealed type is {shown}" in done.stdout, done.stdout + done.stderr
    assert 'No overload variant of "attach"' in done.stdout
    assert done.stdout.count("Revealed type is") == 3 + len(vcsd.__all__)
    assert 'Revealed type is "Any"' not in done.stdout, done.stdout


def test_type_checker_knows_all_public_names() -> None:
    typed = re.findall(r"(\w+) as \1", Path(vcsd.__file__).read_text())
    assert sorted(typed) == sorted(vcsd.__all__)


@pytest.mark.parametrize(
    ("device", "asked", "count"), [("cpu", {}, 1), ("cpu", {"micro_batches": 3}, 3), ("cuda", {}, 2)]
)
def test_a_gpu_computes_one_half_of_a_batch_while_drives_attend_to_the_other(monkeypatch, device, asked, count) -> None:
    counts = []
    monkeypatch.setattr(
        "vcsd.session.in_drives", lambda model, driver, placed, count, replay: nullcontext(counts.append(count))
    )
    model = llama()
    monkeypatch.setattr(type(model), "device", SimpleNamespace(type=device))
    with vcsd.attach(model, **asked):
        assert counts == [count]
