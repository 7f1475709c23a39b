"""docs/policies.md: its policy is short and runs on both executors.

partner of: kv_cache/policies/__init__.py, csd_spec/tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kv_cache import DEVICE, POLICIES, load_policies
from kv_cache.limits import TierLimits
from kv_cache.policies import policy_of
from tests.kv_cache.transfer.test_real import LAYER, Model

BLOCKS = re.findall(r"```python\n(.*?)```", Path("docs/policies.md").read_text(), re.DOTALL)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "pinned.py").write_text(BLOCKS[1])
    return tmp_path / "pinned.py"


def test_example_policy_of_docs_is_short() -> None:
    assert len(BLOCKS[1].strip().splitlines()) <= 30


@pytest.mark.parametrize("layers", [1, 2, 3, 9])
def test_example_policy_moves_real_bytes(file: Path, layers: int) -> None:
    policies = load_policies(file)
    assert "pinned" in policies and "pinned" not in POLICIES
    model = Model(policy_of(f"{file}:pinned").layers, TierLimits(device=layers * LAYER), 0)
    model.iterations()
    assert model.run.table.peak[DEVICE] <= layers * LAYER
    assert bool(model.real.moved) == (layers < 6)
    model.real.close()


def test_example_policy_runs_in_simulated_time(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[1] + BLOCKS[2], {})
    assert "in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("POLICIES = {'x': 3}", "policy x: 3 is not a policy"),
        ("POLICIES = {'': print}", "policy '': a name must be non-empty text"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", r"has no POLICIES, a table by name \(docs/policies.md\)"),
    ],
)
def test_invalid_policy_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"mine\.py.*{reason}"):
        load_policies(file)
