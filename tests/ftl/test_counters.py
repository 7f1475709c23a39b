"""Write amplification by the counters of pages."""

import pytest

from ftl.counters import Counters


@pytest.mark.parametrize(
    ("counts", "waf"),
    [
        ({}, 1.0),
        ({"journal": 5, "moved": 2}, 1.0),
        ({"groups": 6, "blocks": 4}, 1.0),
        ({"groups": 6, "blocks": 4, "journal": 3, "moved": 2, "levelled": 9, "read": 50}, 1.5),
    ],
)
def test_write_amplification_is_of_the_pages_that_hosts_fill(counts, waf):
    counters = Counters(**counts)
    assert counters.data == counts.get("groups", 0) + counts.get("blocks", 0)
    assert counters.waf == waf
