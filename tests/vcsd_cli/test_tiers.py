"""`vcsd run --residency`: K and V in tiers, from the command line.

partner of: vcsd_cli/tiers.py, residency/policies/auto.py, vcsd/tiered.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from residency import POLICIES
from tests.vcsd_cli.test_main import PROMPT, vcsd

RUN = ("run", "--prompt", PROMPT, "--max-new-tokens", "8")
LAYER_MIB = 2 * 4 * 64 * 4 * (len(PROMPT) + 8) / 2**20  # K and V of a layer of the shipped model, one row


def run(capsys, monkeypatch, *args):
    code, out, err = vcsd(capsys, monkeypatch, *RUN, *args, "-o", "json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("policy", [*POLICIES])
@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_bytes_and_peaks(capsys, monkeypatch, tmp_path, policy, batch) -> None:
    sizes = {"device": 2 * batch * LAYER_MIB, "host": batch * LAYER_MIB}
    mib = [f"--{name}-mib={size}" for name, size in sizes.items()]
    result = run(
        capsys, monkeypatch, "--residency", policy, *mib, f"--page-cache-mib={batch * LAYER_MIB}",
        "--batch", str(batch), "--files", str(tmp_path),
    )  # fmt: skip
    assert result["agreement"]["tokens_equal"]
    said = result["residency"]
    assert said["policy"] == policy and said["turns"] == 8
    for path in said["paths"]:
        assert path["bytes"] == path["modelled_bytes"] > 0
    for place in said["places"]:
        assert place["peak_bytes"] <= sizes.get(place["name"], 1e9) * 2**20
    assert bool(said["paths"]) == (policy != "in-storage")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tiers", "chosen"),
    [
        ({"device": 100}, "fit the device"),
        ({"device": 2, "host": 100}, "fit host memory, not the device"),
        ({"device": 2, "host": 2, "page-cache": 100}, "fit the page cache, not host memory"),
        ({"device": 2, "host": 2, "page-cache": 2}, "are more than any tier in memory keeps"),
    ],
)
def test_auto_chooses_by_what_fits_and_says_why(capsys, monkeypatch, tmp_path, tiers, chosen) -> None:
    mib = [f"--{name}-mib={size * LAYER_MIB}" for name, size in tiers.items()]
    result = run(capsys, monkeypatch, "--residency", "auto", *mib, "--files", str(tmp_path))
    assert result["agreement"]["tokens_equal"]
    assert chosen in result["residency"]["why"]


def test_for_people(capsys, monkeypatch, tmp_path) -> None:
    code, out, _ = vcsd(
        capsys, monkeypatch, *RUN, "--residency", "split", "--page-cache-mib", "0.1", "--files", str(tmp_path)
    )
    assert code == 0
    for words in ("K and V in tiers: split", "Moved in 8 forwards", "direct>device", "greedy tokens equal"):
        assert words in out


def test_a_policy_of_ones_own(capsys, monkeypatch, tmp_path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from residency import HOST, POLICIES\n"
        "def mine(t):\n"
        "    for layer in t.layers:\n"
        "        for x in t.extents(layer): t.copy(x, 'device')\n"
        "        t.attend(layer)\n"
        "        for x in t.extents(layer): t.move(x, HOST)\n"
        "POLICIES['mine'] = mine\n"
    )
    result = run(capsys, monkeypatch, "--residency", "mine", "--policies", str(mine))
    assert result["agreement"]["tokens_equal"]
    assert {path["name"] for path in result["residency"]["paths"]} == {"device>host", "host>device"}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--residency", "lru"], "residency = 'lru': must be one of reactive, flexgen"),
        (["--device-mib", "3"], "say with --residency who moves K and V"),
        (["--residency", "flexgen", "--device-mib", "-1"], "--device-mib"),
        (["--residency", "flexgen", "--device-mib", "nan"], "--device-mib"),
        (["--residency", "flexgen", "--device-mib", "0.1"], "the device is too small: a layer's K and V"),
        (["--residency", "flexgen", "--files", "/nowhere"], "files = /nowhere: is no folder and no device"),
        (["--residency", "flexgen", "--files", "/dev/null"], "/dev/null"),
        (["--residency", "flexgen", "--attention", "dense"], "--attention is of drives"),
        (["--residency", "flexgen", "--policies", "/nowhere.py"], "/nowhere.py"),
        (["--residency", "dual-blade", "--page-cache-mib", "0", "--files", "/dev/shm"], "no direct I/O"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, monkeypatch, args, reason) -> None:
    code, _, err = vcsd(capsys, monkeypatch, *RUN, *args)
    assert code != 0
    (line,) = [each for each in err.splitlines() if each.startswith("vcsd: ")]
    assert reason in line


def test_a_device_that_holds_something_is_left_alone(capsys, monkeypatch, tmp_path) -> None:
    """Whatever is no folder and no device is refused, files with something in them too."""
    disk = Path(tmp_path, "disk.img")
    disk.write_bytes(b"precious" * 1024)
    code, _, err = vcsd(capsys, monkeypatch, *RUN, "--residency", "dual-blade", "--files", str(disk))
    assert code == 1 and "is no folder and no device" in err
    assert disk.read_bytes() == b"precious" * 1024
