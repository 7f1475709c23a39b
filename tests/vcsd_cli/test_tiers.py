"""`vcsd run --policy`: the KV cache in tiers, from the command line.

partner of: vcsd_cli/tiers.py, kv_cache/policies/auto.py, vcsd/config.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from csd_link.driveset import DriveSetConfig
from csd_link.run_dir import run_dir
from csd_spec import LogPage
from kv_cache.hardware import HOST, PAGE_CACHE
from kv_cache.policies import POLICIES, moves_blocks
from kv_cache.policies.auto import Auto
from kv_cache.policies.flexgen import FlexGen
from kv_cache.policies.reactive import Reactive
from kv_cache.policies.split import Split
from tests.vcsd_cli.test_main import PROMPT, vcsd
from vcsd.administer import read_log
from vcsd.transport import open_drives

RUN = ("run", "--prompt", PROMPT, "--max-new-tokens", "8")
OPTIONS = {"device": "--device-kv-mib", "host": "--host-kv-mib", "page-cache": "--page-cache-mib"}
LAYER_MIB = 2 * 4 * 64 * 4 * (len(PROMPT) + 8) / 2**20  # KV data of a layer of the shipped model, one row


def run(capsys, monkeypatch, *args):
    code, out, err = vcsd(capsys, monkeypatch, *RUN, *args, "-o", "json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("policy", ["in-storage", *filter(moves_blocks, POLICIES)])
@pytest.mark.parametrize("batch", [1, 4])
def test_tiers_run_reports_tokens_bytes_and_peaks(capsys, monkeypatch, tmp_path, policy, batch) -> None:
    sizes = {"device": 2 * batch * LAYER_MIB, "host": batch * LAYER_MIB}
    mib = [f"{OPTIONS[name]}={size}" for name, size in sizes.items()]
    limits = [*mib, f"--page-cache-mib={batch * LAYER_MIB}", "--files", str(tmp_path)] if policy != "in-storage" else []
    result = run(capsys, monkeypatch, "--policy", policy, "--batch", str(batch), *limits)
    assert result["agreement"]["tokens_equal"]
    said = result["kv_cache"]
    assert said["policy"] == policy and said["iterations"] == 8
    for path in said["routes"]:
        assert path["bytes"] == path["simulated_bytes"] > 0
    for tier in said["tiers"]:
        assert tier["peak_bytes"] <= sizes.get(tier["name"], 1e9) * 2**20
    assert bool(said["routes"]) == (policy != "in-storage")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tiers", "chosen"),
    [
        ({"device": 100}, "fits on the device"),
        ({"device": 2, "host": 100}, "fits in host memory, not on the device"),
        ({"device": 2, "host": 2, "page-cache": 100}, "fits in the page cache, not in host memory"),
        ({"device": 2, "host": 2, "page-cache": 2}, "exceeds each tier in memory"),
    ],
)
def test_auto_policy_follows_sizes_and_states_reason(capsys, monkeypatch, tmp_path, tiers, chosen) -> None:
    mib = [f"{OPTIONS[name]}={size * LAYER_MIB}" for name, size in tiers.items()]
    result = run(capsys, monkeypatch, "--policy", "auto", *mib, "--files", str(tmp_path))
    assert result["agreement"]["tokens_equal"]
    assert chosen in result["kv_cache"]["why"]


def test_tiers_run_prints_text_report(capsys, monkeypatch, tmp_path) -> None:
    code, out, _ = vcsd(
        capsys, monkeypatch, *RUN, "--policy", "split", "--page-cache-mib", "0.1", "--files", str(tmp_path)
    )
    assert code == 0
    for words in ("KV cache in tiers: split", "Moved in 8 forwards", "direct>device", "greedy tokens equal"):
        assert words in out


def test_policy_from_file_is_used(capsys, monkeypatch, tmp_path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from kv_cache import HOST, POLICIES, Policy\n"
        "class Mine(Policy):\n"
        "    def layers(self, it):\n"
        "        for layer in it.layers:\n"
        "            for x in it.blocks(layer): it.copy(x, 'device')\n"
        "            it.attend(layer)\n"
        "            for x in it.blocks(layer): it.move(x, HOST)\n"
        "POLICIES['mine'] = Mine\n"
    )
    result = run(capsys, monkeypatch, "--policy", f"{mine}:mine")
    assert result["agreement"]["tokens_equal"]
    assert {path["name"] for path in result["kv_cache"]["routes"]} == {"device>host", "host>device"}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--policy", "lru"], "--policy 'lru': schedules requests of a server"),
        (["--policy", "best"], "--policy 'best': must be one of reactive, flexgen"),
        (["--device-kv-mib", "3"], "--device-kv-mib: all KV data is in drives: leave it out, or add --policy"),
        (["--policy", "in-storage", "--files", "."], "--files: all KV data is in drives"),
        (
            ["--policy", "flexgen", "--drives", "3"],
            "--drives '3': an option of drives, and the policy flexgen attends on the model's device",
        ),
        (["--policy", "flexgen", "--device-kv-mib", "-1"], "--device-kv-mib"),
        (["--policy", "flexgen", "--device-kv-mib", "nan"], "--device-kv-mib"),
        (["--policy", "flexgen", "--device-kv-mib", "0.1"], "one layer take"),
        (
            ["--policy", "flexgen", "--files", "/nowhere"],
            "--files /nowhere: no such folder",
        ),
        (["--policy", "flexgen", "--files", "/dev/null"], "/dev/null"),
        (["--policy", "flexgen", "--method", "dense"], "--method 'dense': an option of drives"),
        (["--policy", "tutti", "--kv-dtype", "bf16"], "--kv-dtype 'bf16': an option of drives"),
        (["--policy", "tutti", "--sparf-recent", "4"], "--sparf-recent 4: an option of drives"),
        (["--policy", "/nowhere.py:mine"], "/nowhere.py"),
        (["--policy", "dual-blade", "--page-cache-mib", "0", "--files", "/dev/shm"], "no direct I/O"),
    ],
)
def test_invalid_tier_options_are_one_line_error(capsys, monkeypatch, args, reason) -> None:
    code, _, err = vcsd(capsys, monkeypatch, *RUN, *args)
    assert code != 0
    (line,) = [each for each in err.splitlines() if each.startswith("vcsd: ")]
    assert reason in line


def test_disk_with_data_is_not_overwritten(capsys, monkeypatch, tmp_path) -> None:
    disk = Path(tmp_path, "disk.img")
    disk.write_bytes(b"precious" * (1 << 20))
    args = (*RUN, "--policy", "dual-blade", "--page-cache-mib", "0", "--files", str(disk))
    code, _, err = vcsd(capsys, monkeypatch, *args)
    assert code and "only written to with --allow-overwrite" in err
    assert disk.read_bytes() == b"precious" * (1 << 20)
    code, _, err = vcsd(capsys, monkeypatch, *args, "--allow-overwrite")
    assert code == 0, err
    assert disk.read_bytes() != b"precious" * (1 << 20)


@pytest.mark.usefixtures("fuse", "own_run_dir")
def test_mounted_drive_works_as_direct_tier(capsys, monkeypatch) -> None:
    """Our own drive as a plain one: its namespace by io_uring, and it counts and times the requests."""
    with open_drives(DriveSetConfig(count=1, transport="fuse")) as (drive,):
        (namespace,) = run_dir().glob("run-*/mount*/namespace")
        result = run(capsys, monkeypatch, "--policy", "dual-blade", "--page-cache-mib", "0", "--files", str(namespace))
        assert result["agreement"]["tokens_equal"]
        moved = {path["name"]: path["bytes"] for path in result["kv_cache"]["routes"]}
        assert moved["direct>device"] > moved["device>direct"] > 0
        smart = read_log(drive, LogPage.SMART)
        assert min(smart["host_read_commands"], smart["host_write_commands"]) > 0


@pytest.mark.parametrize(
    ("total", "policy", "home"), [(4, Reactive, None), (6, FlexGen, HOST), (8, FlexGen, PAGE_CACHE), (9, Split, None)]
)
def test_auto_takes_the_first_tier_that_just_holds_it(total, policy, home) -> None:
    chosen, _ = Auto()._choose(total, device=4, host=6, page_cache=8)
    assert isinstance(chosen, policy) and getattr(chosen, "home", None) == home
