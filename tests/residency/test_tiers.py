"""Tiers as values, and the machine that they are."""

import pytest

from residency.machine import CSD
from residency.tiers import Tiers


def test_files_are_a_path_that_exists(tmp_path):
    assert Tiers(files=tmp_path).files == tmp_path
    with pytest.raises(ValueError, match=r"must be a pathlib\.Path"):
        Tiers(files=str(tmp_path))
    with pytest.raises(ValueError, match="there is no such folder"):
        Tiers(files=tmp_path / "none")


@pytest.mark.parametrize("drives", [True, False])
def test_a_machine_has_drives_that_attend_if_asked(drives):
    machine = Tiers().machine(0, drives)
    assert (CSD in machine.places) == drives and any(CSD in ends for ends in machine.paths) == drives
