"""Units of time: a closed set; each name appears in full in a completion."""

import pytest

from csd_spec.units import ENGINE_UNITS, FLASH_UNITS, MAX_UNIT_BYTES, STEP_UNITS, UNITS, check_unit


def test_units_differ_in_completion_names():
    assert len({unit.encode()[:MAX_UNIT_BYTES] for unit in UNITS}) == len(UNITS) == len(set(UNITS))
    assert max(map(len, UNITS)) <= MAX_UNIT_BYTES
    assert {*FLASH_UNITS, *ENGINE_UNITS} < set(STEP_UNITS) < set(UNITS)


@pytest.mark.parametrize("unit", ["", "flash", "flash_embedding_of_mine"])
def test_unknown_unit_is_refused_by_name(unit):
    with pytest.raises(ValueError, match=f"unit '{unit}': must be one of network, link"):
        check_unit(unit)
