"""Descriptions that do not fit together are refused, with the field's name.

partner of: csd_spec/drive.py
"""

from dataclasses import replace

import pytest

from csd_spec.presets import BLOCK_SSDS, INSTCSD_ZYNQ7045_8CH, NVMEVIRT_970PRO


@pytest.mark.parametrize("ssd", BLOCK_SSDS.values(), ids=BLOCK_SSDS)
def test_sizes_of_conventional_ssds(ssd):
    assert ssd.luns == ssd.channels * ssd.luns_per_channel // ssd.partitions
    assert ssd.units_per_page * ssd.mapping_bytes == ssd.flash_page_bytes
    assert ssd.line_units == ssd.luns * ssd.flash_pages_per_block * ssd.units_per_page
    spare = ssd.partitions * ssd.blocks_per_lun * ssd.line_units / ssd.logical_units - 1
    assert spare == pytest.approx(ssd.overprovision_percent / 100, abs=1e-4)
    assert ssd.logical_units % ssd.partitions == 0


@pytest.mark.parametrize(("field", "value"), [("partitions", 3), ("partitions", 16), ("mapping_bytes", 5000)])
def test_parts_that_do_not_divide_the_whole_are_refused(field, value):
    assert NVMEVIRT_970PRO.channels == 8
    named = "flash_page_bytes" if field == "mapping_bytes" else field
    with pytest.raises(ValueError, match=f"^{named} = "):
        replace(NVMEVIRT_970PRO, **{field: value})


@pytest.mark.parametrize("partitions", [1, 2, 8])
def test_partitions_that_divide_the_channels_are_taken(partitions):
    assert replace(NVMEVIRT_970PRO, partitions=partitions).luns == 8 // partitions * NVMEVIRT_970PRO.luns_per_channel


def test_memory_holds_the_cache_and_a_page():
    page = INSTCSD_ZYNQ7045_8CH.geometry.page_bytes
    replace(INSTCSD_ZYNQ7045_8CH, cache_bytes=page, dram_bytes=2 * page)
    with pytest.raises(ValueError, match="dram_bytes"):
        replace(INSTCSD_ZYNQ7045_8CH, cache_bytes=page, dram_bytes=2 * page - 1)
