"""The link against a simulation that keeps every transfer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from csd_firmware.link import LinkUse
from tests.properties import examples


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 30)), max_size=60))
def test_transfers_take_first_gap_and_never_overlap(transfers):
    link, taken = LinkUse(), []
    for ready_ns, ns in transfers:
        starts = [ready_ns, *(end for _, end in taken if end > ready_ns)]
        wanted = min(at for at in starts if all(at + ns <= begin or end <= at for begin, end in taken))
        assert link.end_ns(ready_ns, ns) == link.end_ns(ready_ns, ns) == wanted + ns
        end_ns = link.cross(ready_ns, ns)
        assert end_ns == wanted + ns
        taken.append((end_ns - ns, end_ns))


def test_busy_link_delays_every_transfer():
    link = LinkUse()
    assert [link.cross(0, 10) for _ in range(200)] == [10 * (number + 1) for number in range(200)]
    assert link.cross(1000, 0) == link.end_ns(1000, 0) == 1000
    assert link.cross(2500, 10) == 2510
    assert link.cross(2000, 10) == 2010
