"""What a controller says of itself."""

import struct

from csd_link.nvme import parse_controller


def test_an_identify_page_has_nvme_clis_names():
    page = bytearray(4096)
    struct.pack_into(
        "<HH20s40s8s", page, 0, 0x1B36, 0x1AF4, b"serial".ljust(20), b"A Model".ljust(40, b"\0"), b"1.0".ljust(8)
    )
    page[77] = 7
    struct.pack_into("<HI", page, 78, 3, 0x10400)
    struct.pack_into("<I", page, 516, 256)
    assert parse_controller(bytes(page)) == {
        "vid": 0x1B36,
        "ssvid": 0x1AF4,
        "sn": "serial",
        "mn": "A Model",
        "fr": "1.0",
        "mdts": 7,
        "cntlid": 3,
        "ver": 0x10400,
        "nn": 256,
    }
