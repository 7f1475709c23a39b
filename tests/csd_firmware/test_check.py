"""Text of a refused value in the reason of a completion."""

import pytest

from csd_firmware import Firmware
from csd_spec import SeqCreate


@pytest.mark.parametrize("length", [1, 38, 39, 500])
def test_rejected_value_is_shown_in_40_characters(small_drive, length):
    value = "x" * length
    shown = (
        Firmware(small_drive).step(SeqCreate(value, 1, 2, 16, 64), 0).reason.removeprefix("count = ").partition(":")[0]
    )
    assert shown == repr(value) if length <= 38 else (len(shown), shown[-3:]) == (40, "...")
