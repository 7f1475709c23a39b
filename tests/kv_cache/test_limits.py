"""Tier limits as values, and the machine built from them."""

import pytest

from kv_cache.hardware import CSD
from kv_cache.limits import TierLimits


def test_invalid_file_tier_path_is_refused(tmp_path):
    assert TierLimits(files=tmp_path).files == tmp_path
    with pytest.raises(ValueError, match=r"must be a pathlib\.Path"):
        TierLimits(files=str(tmp_path))
    with pytest.raises(ValueError, match="no such folder, file or device"):
        TierLimits(files=tmp_path / "none")


@pytest.mark.parametrize("drives", [True, False])
def test_machine_has_drive_tier_only_if_requested(drives):
    machine = TierLimits().machine(0, drives)
    assert (CSD in machine.tiers) == drives and any(CSD in ends for ends in machine.routes) == drives
