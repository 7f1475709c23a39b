"""Configuration of `vcsd.attach` and `vcsd.serve`: types, ranges, what is made of them, and types for a type checker.

partner of: vcsd/config.py, vcsd/__init__.py
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
from vcsd.config import AttachConfig, ServingConfig

USES = """
import vcsd
from transformers import LlamaForCausalLM

def use(model: LlamaForCausalLM) -> None:
    with vcsd.attach(model, drives=2, compression=8) as run:
        reveal_type(run)
    with vcsd.attach(model, policy="auto", tiers=vcsd.TierLimits()) as tiered:
        reveal_type(tiered)
    with vcsd.serve(model, policy="lru") as server:
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
        ({"drives": 1.5}, r"drives = 1.5: must be a whole number, at least 1, a fleet \(ray\), or devices"),
        ({"drives": True}, "drives = True: must be a whole number"),
        ({"drives": 0}, "drives = 0: must be a whole number, at least 1"),
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
        ({"redundancy": "mirror"}, "redundancy = 'mirror': at least 2 drives are needed"),
        ({"network": "3gbe"}, "network = '3gbe'"),
        ({"method": "nosuch"}, "method = 'nosuch': the drives know dense, sparf"),
    ],
)
def test_attach_refuses_what_no_drive_can_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason), vcsd.attach(llama(), **options):
        pass


def test_options_are_those_of_drives_attention_and_steps() -> None:
    here = Path(__file__)
    config = AttachConfig(drives=np.int64(2), method="ours", layout="progressive", methods_file=here, threads=3)
    assert config.attention() == AttentionConfig.named("ours", layout="progressive")
    assert config.drive_set() == DriveSetConfig(count=2, methods_file=here, threads=3)
    with_spares = AttachConfig(drives=2, redundancy="mirror", spares=np.int32(1), transport="process")
    assert with_spares.drive_set() == DriveSetConfig(count=2, transport="process", spares=1)


def test_attention_is_exact_where_a_policy_is_chosen() -> None:
    assert AttachConfig().attention() == AttentionConfig.named("sparf")
    assert AttachConfig(policy="in-storage").attention() == AttentionConfig.named("dense")
    assert ServingConfig().attention() == AttentionConfig.named("dense")
    assert ServingConfig(policy="in-storage", drives=2, method="ours").attention() == AttentionConfig.named("ours")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": "auto", "layout": "int8"}, "layout = 'int8': an option of drives, and the policy auto"),
        ({"policy": "auto", "drives": 2}, "drives = 2: an option of drives"),
        ({"policy": "auto", "tiers": 5}, "tiers: must be an instance of TierLimits"),
        ({"tiers": TierLimits()}, "with tiers set a policy"),
        ({"policy": "in-storage", "tiers": TierLimits()}, "with tiers set a policy"),
        ({"policy": "lru"}, "policy = 'lru': schedules requests of a server"),
        ({"policy": "best"}, "policy = 'best': must be one of reactive"),
        ({"policy": 5}, "policy = 5: 5 is not a policy"),
    ],
)
def test_options_of_drives_and_of_tiers_exclude_each_other(options: dict[str, Any], reason: str) -> None:
    AttachConfig(policy="auto", tiers=TierLimits(), drives=None, method=None)
    with pytest.raises(ValueError, match=reason):
        AttachConfig(**options)


def test_keywords_go_before_a_configuration() -> None:
    with vcsd.attach(llama(), AttachConfig(drives=2, method="dense"), drives=1) as csd:
        assert (len(csd.driver.devices), csd.driver.attention.method) == (1, "dense")
        assert csd.policy == "in-storage" and csd.placed.in_drives == tuple(range(csd.driver.shape.layers))
    with vcsd.attach(llama(), policy="flexgen") as tiered:
        for refused in (lambda: tiered.driver, lambda: tiered.placed):
            with pytest.raises(ValueError, match="policy = 'flexgen': this session has no drives"):
                refused()


def test_first_option_of_drives_is_named() -> None:
    assert ServingConfig(policy="lru", tiers=TierLimits(), max_batch_size=2, slo_scale=2.0).drive_option() == ""
    assert ServingConfig(drives=2, redundancy="mirror").drive_option() == "drives = 2"
    with pytest.raises(ValueError, match="redundancy = 'mirror': an option of drives, and the policy lru uses none"):
        ServingConfig(policy="lru", drives=0, redundancy="mirror")


@pytest.mark.slow
def test_public_names_have_types(tmp_path: Path) -> None:
    names = "".join(f"reveal_type(vcsd.{name})\n" for name in vcsd.__all__)
    (tmp_path / "uses.py").write_text(f"{USES}\n{names}")
    mypy = [sys.executable, "-m", "mypy", str(tmp_path / "uses.py")]
    done = subprocess.run(mypy, capture_output=True, text=True, env={**os.environ, "MYPYPATH": "."})
    for shown, times in (('"vcsd.session.Session"', 2), ('"vcsd.server.Server"', 1)):
        assert done.stdout.count(f"Revealed type is {shown}") == times, done.stdout + done.stderr
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
