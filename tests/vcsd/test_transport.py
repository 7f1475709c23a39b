"""Ways to drives, made of our firmware: the same figures on each."""

import numpy as np
import pytest

from csd_link.driveset import DriveSet
from tests.served import decoder
from vcsd.transport import check_method, methods_of, open_drives

pytestmark = pytest.mark.usefixtures("own_run_dir")


@pytest.mark.parametrize("transport", ["process", "fuse", "window:{}/window.bin"])
def test_every_way_in_gives_the_same_outputs_and_modelled_times(tmp_path, transport, request):
    if transport == "fuse":
        request.getfixturevalue("fuse")
    runs = []
    for way in ("inproc", transport.format(tmp_path)):
        with open_drives(DriveSet(count=2, transport=way)) as devices:
            driver, _, step = decoder(devices, flush_every=3)
            outputs = [step() for _ in range(8)]
            records = [(each.ns, each.breakdown_ns, each.link_bytes, each.flash) for each in driver.traffic.steps]
            runs.append((np.stack(outputs), records, driver.now_ns))
            driver.close()
    (here, *figures), (there, *same) = runs
    np.testing.assert_array_equal(here, there)
    assert figures == same


def test_drives_that_are_made_for_a_run_know_our_methods():
    known = methods_of(DriveSet())
    check_method("sparf", known)
    with pytest.raises(ValueError, match="attention = 'magic': the drives know dense, sparf"):
        check_method("magic", known)
