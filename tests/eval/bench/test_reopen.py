"""A drive whose KV data exceeds its process's memory: it decodes, is killed, is opened again, and continues.

partner of: eval/bench/reopen.py, eval/bench/reopen_drive.py, eval/bench/child.py
"""

import pytest

from csd_firmware import InProcessDrive
from vcsd_eval.bench import child
from vcsd_eval.bench.reopen import RecoveryLoad, bench_reopen
from vcsd_eval.bench.reopen_drive import RecoveryJob, run

SMALL = {"kv_mib": 16, "layers": 2, "kv_heads": 4}


@pytest.mark.parametrize(("medium", "method"), [("direct", "dense"), ("direct", "sparf"), ("mapped", "sparf")])
def test_killed_drive_continues_with_same_tokens(tmp_path, medium, method):
    ticks = []
    load = RecoveryLoad(
        **SMALL, medium=medium, method=method, steps=9, flush_interval_steps=2, kills=2, folder=tmp_path
    )
    found = bench_reopen(load, ticks.append)
    assert found["tokens_equal"]
    assert len(ticks) == 9 + found["tokens_lost"]
    assert found["reopen_s"] > 0 and found["base_memory_mib"] < found["peak_memory_mib"]
    assert list(tmp_path.iterdir()) == []


def test_drive_five_times_memory_recovers(tmp_path):
    """1 GiB of KV data under a limit of 204 MiB: a tenth of 10 GiB under 2 GiB. The memory of the interpreter and the
    code does not count against the group.
    """
    load = RecoveryLoad(
        kv_mib=1024, limit_mib=204, layers=32, kv_heads=4, steps=3, flush_interval_steps=1, folder=tmp_path
    )
    found = bench_reopen(load)
    if found["how"] is None:
        pytest.skip(f"nothing limits the memory here: {found['why']}")
    assert found["tokens_equal"] and found["peak_memory_mib"] - found["base_memory_mib"] < 1024 / 3


def test_generated_tokens_depend_on_earlier_ones(tmp_path):
    job = RecoveryJob(
        folder=str(tmp_path),
        medium="direct",
        cache_bytes=1 << 20,
        method="dense",
        layers=1,
        kv_heads=2,
        queries=1,
        tokens=64,
        steps=4,
        flush_interval_steps=2,
        fill=True,
        known=[],
    )
    said = []
    run(job, said.append)
    tokens = [line["token"] for line in said if "token" in line]
    assert tokens == said[0]["expected"] and len(set(tokens)) == 4
    device = InProcessDrive.reopen(tmp_path)
    (handle,) = device.firmware.ftl.sequences
    assert device.firmware.ftl.sequence(handle).lengths.tolist() == [68]
    device.close()


def test_recovery_load_beyond_disk_is_refused(tmp_path):
    with pytest.raises(OSError, match="MiB are needed: choose another --folder or reduce --kv-mib"):
        bench_reopen(RecoveryLoad(kv_mib=1 << 20, folder=tmp_path))


def test_failed_child_error_has_reason():
    with pytest.raises(OSError, match="JSONDecodeError"):
        child.done("vcsd_eval.bench.reopen_drive", "no job\n", None, 60.0)
