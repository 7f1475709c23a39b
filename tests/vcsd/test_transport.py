"""Transports to drives with our firmware: the same figures on each."""

import numpy as np
import pytest

from attention_engine.step import WORTH_THREADS
from csd_link.driveset import DriveSetConfig
from csd_spec import AttentionConfig, KvRead
from tests.served import decoder
from vcsd.transport import check_method, methods_of, open_drives

pytestmark = pytest.mark.usefixtures("own_run_dir")


@pytest.mark.parametrize("transport", ["process", "fuse", "window:{}/window.bin", "nvme+tcp"])
def test_all_transports_give_same_outputs_and_times(tmp_path, transport, request):
    if transport == "fuse":
        request.getfixturevalue("fuse")
    runs = []
    for way in ("inproc", transport.format(tmp_path)):
        with open_drives(DriveSetConfig(count=2, transport=way)) as devices:
            driver, batch, step = decoder(devices, flush_interval_steps=3)
            outputs = [step() for _ in range(8)]
            k, v = driver.read(batch, slice(None), 0)
            for result, whole in zip(driver.read(batch, slice(None), 0, 33, 20), (k, v), strict=True):
                np.testing.assert_array_equal(result, whole[33:53])
            seqs, parts = tuple(batch.handles[0].tolist()), range(0, 58, 10)
            reads = [devices[0].submit(KvRead(seqs, 0, first, 10), driver.now_ns) for first in parts]
            together = [read.result() for read in reads]
            np.testing.assert_array_equal(np.concatenate([each.data[0] for each in together]), k[:, :2])
            times = [each.breakdown_ns for each in together]
            records = [(each.ns, each.breakdown_ns, each.link_bytes, each.flash) for each in driver.traffic.steps]
            runs.append((np.stack(outputs), records, times, driver.now_ns))
            driver.close()
    (here, *figures), (there, *same) = runs
    np.testing.assert_array_equal(here, there)
    assert figures == same


LONG = WORTH_THREADS  # tokens, so that two threads are worth it in a drive with one head


@pytest.mark.parametrize(
    ("transport", "medium"),
    [
        ("inproc", "direct"),
        ("process", "memory"),
        ("process", "direct"),
        ("fuse", "direct"),
        ("window:{}/window.bin", "direct"),
    ],
)
def test_media_and_threads_change_no_result(tmp_path, transport, medium, request):
    if transport == "fuse":
        request.getfixturevalue("fuse")
    given = {"data_dir": tmp_path / "kept", "medium": medium, "page_buffer_mib": 1, "threads": 2}
    runs = []
    for drives in (DriveSetConfig(threads=1), DriveSetConfig(transport=transport.format(tmp_path), **given)):
        with open_drives(drives) as devices:
            driver, _, step = decoder(devices, LONG, flush_interval_steps=3)
            outputs = np.stack([step() for _ in range(4)])
            runs.append((outputs, [(each.ns, each.link_bytes, each.flash) for each in driver.traffic.steps]))
            driver.close()
    (here, figures), (there, same) = runs
    np.testing.assert_array_equal(here, there)
    assert figures == same


def test_options_of_served_drives_not_requested(tmp_path):
    path = tmp_path / "windows"
    with (
        open_drives(DriveSetConfig(transport=f"window:{path}")),
        pytest.raises(ValueError, match="set by their operator"),
    ):
        methods_of(DriveSetConfig(transport=f"window:{path}", threads=2))


def test_drives_of_a_run_know_shipped_methods():
    known = methods_of(DriveSetConfig())
    check_method(AttentionConfig("sparf"), known)
    with pytest.raises(ValueError, match="method = 'magic': the drives know dense, sparf"):
        check_method(AttentionConfig("magic"), known)
