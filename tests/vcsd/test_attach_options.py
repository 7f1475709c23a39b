"""Options of `vcsd.attach`: types, ranges, what is made of them, and types for a type checker.

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

import numpy as np
import pytest

import vcsd
from csd_link.driveset import DriveSetConfig
from csd_spec import AttentionConfig
from kv_cache.limits import TierLimits
from tests.host_driver.hf.test_cache import llama
from vcsd.attach_options import AttachConfig, check_in_tiers

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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"flush_interval_steps": True}, "flush_interval_steps: must be a valid integer"),
        ({"flush_interval_steps": -1}, "flush_interval_steps: must be greater than or equal to 0"),
        ({"micro_batches": 0}, "micro_batches: must be greater than or equal to 1"),
        ({"restart_drives": 1}, "restart_drives: must be a valid boolean"),
        ({"data_dir": "here"}, "data_dir: must be an instance of Path"),
        ({"drives": 1.5}, r"drives = 1.5: must be a whole number above 0, a fleet \(ray\), or devices"),
        ({"drives": True}, "drives = True: must be a whole number"),
        ({"drives": 0}, "drives = 0: must be a whole number above 0"),
        ({"budget": 8}, "budget: must be an instance of SparsityBudget"),
        ({"method": 3}, "method: must be a valid string"),
        ({"compresion": 8}, "compresion: no such field: did you mean compression"),
        ({"spares": 1}, "spares = 1: redundancy none does not use them"),
    ],
)
def test_option_of_wrong_type_or_range_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AttachConfig(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drives": [3]}, "drives: 3 is not a device: it has no method submit"),
        ({"sizes": 8}, "sizes: no such field"),
        ({"redundancy": "mirror"}, "redundancy = mirror: at least 2 drives are needed"),
        ({"network": "3gbe"}, "network = '3gbe'"),
    ],
)
def test_attach_refuses_what_no_drive_can_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason), vcsd.attach(llama(), **options):
        pass


def test_options_are_those_of_drives_attention_and_steps() -> None:
    here = Path(__file__)
    config = AttachConfig(drives=np.int64(2), method="ours", layout="progressive", methods_file=here, threads=3)
    assert config.attention() == AttentionConfig.named("ours", layout="progressive")
    assert AttachConfig().attention("dense") == AttentionConfig.named("dense")
    assert config.drive_set() == DriveSetConfig(count=2, methods_file=here, threads=3)
    with_spares = AttachConfig(drives=2, redundancy="mirror", spares=np.int32(1), transport="process")
    assert with_spares.drive_set() == DriveSetConfig(count=2, transport="process", spares=1)


def test_drive_option_with_tiers_is_refused() -> None:
    check_in_tiers("auto", TierLimits(), {"drives": 1, "method": None})
    with pytest.raises(ValueError, match="layout is a drive option"):
        check_in_tiers("auto", None, {"layout": "int8"})
    with pytest.raises(ValueError, match="tiers = 5: must be a TierLimits"):
        check_in_tiers("auto", 5, {})  # type: ignore[arg-type] # users without a type checker
    with pytest.raises(ValueError, match="with tiers set a policy"):
        check_in_tiers("in-storage", TierLimits(), {})


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
        "vcsd.session.attached", lambda model, kv, kinds, count, replay: nullcontext(counts.append(count))
    )
    model = llama()
    monkeypatch.setattr(type(model), "device", SimpleNamespace(type=device))
    with vcsd.attach(model, **asked):
        assert counts == [count]
